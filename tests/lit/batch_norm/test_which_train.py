"""The guard concerns itself with the layers that really train, when they do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning

from tests.core.batch_norm.nets import furthest, of_big_batch, statistics
from tests.lit.batch_norm.fits import (
    WINDOW,
    At,
    ConvModule,
    Validated,
    batches,
    fit,
    inputs,
)
from trainkit.core.batch_norm.layers import every_layer

pytestmark = pytest.mark.filterwarnings(
    "ignore:Found .* in eval mode at the start",
    "ignore:You defined a `validation_step` but",
)

EXACT = 1e-10
BACKBONE = ("bn1", "bn2")


class FrozenBackbone(Validated):
    """Puts its pretrained part in evaluation mode where users do."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.net(torch.cat([inputs(batches()) * 2 + 1]))  # statistics worth keeping
        setattr(self, hook, self.freeze_backbone)

    def freeze_backbone(self) -> None:
        for name in BACKBONE:
            getattr(self.net, name).eval()


@pytest.mark.parametrize(
    ("policy", "hook"),
    [
        ("recalibrate", "on_train_start"),
        ("recalibrate", "on_train_epoch_start"),
        ("momentum", "on_fit_start"),
        ("freeze", "on_train_start"),
        ("ignore", "on_train_epoch_start"),
    ],
)
def test_frozen_backbone_keeps_its_statistics(policy: str, hook: str) -> None:
    module = FrozenBackbone(hook)
    before = statistics(module.net)
    fit(policy, module=module, val=batches(batch_size=27))
    after = statistics(module.net)
    for key, value in before.items():
        kept = key.startswith(BACKBONE)
        assert torch.equal(after[key], value) is (kept or policy == "freeze"), key
    assert not module.net.bn1.training
    assert module.net.bn1.momentum == 0.1


@pytest.mark.parametrize(
    "hook", ["on_train_start", "on_train_epoch_start", "on_fit_start"]
)
def test_frozen_backbone_is_not_spoken_of(hook: str) -> None:
    with pytest.warns(UserWarning, match=r"BatchNorm: net\.bn3 normalises"):
        fit("warn", module=FrozenBackbone(hook))


def test_module_that_evaluates_throughout_is_left_alone() -> None:
    module = ConvModule()
    module.eval()
    before = statistics(module.net)
    for policy in ("warn", "recalibrate", "freeze", "momentum"):
        fit(policy, module=module)
        assert furthest(statistics(module.net), before) == 0
        assert not any(layer.training for layer in every_layer(module).values())


# ---- finetuning ----------------------------------------------------------------------


class Unfreezes(BaseFinetuning):
    """From the second epoch on, BatchNorm of the first part too."""

    def freeze_before_training(self, pl_module: Any) -> None:
        for name in BACKBONE:
            self.freeze(getattr(pl_module.net, name), train_bn=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            for name in BACKBONE:
                self.make_trainable(getattr(pl_module.net, name))


def test_layers_set_free_later_are_recalibrated() -> None:
    module = fit("recalibrate", Unfreezes(), module=Validated(), val=batches())
    wanted = of_big_batch(module.net, inputs(batches()))
    assert furthest(statistics(module.net), wanted) <= EXACT


def test_layers_set_free_later_are_frozen() -> None:
    module = ConvModule()
    before = statistics(module.net)
    fit("freeze", Unfreezes(), module=module)
    assert furthest(statistics(module.net), before) == 0


def test_layers_set_free_later_get_the_momentum() -> None:
    seen: list[float] = []
    note = At("on_train_batch_end", lambda t, m: seen.append(m.net.bn1.momentum))
    module = fit("momentum", Unfreezes(), note)
    assert seen[:7] == [0.1] * 7
    assert seen[7] == pytest.approx(1 - 0.9 ** (1 / WINDOW))
    assert module.net.bn1.momentum == 0.1
