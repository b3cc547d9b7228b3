"""The guard concerns itself with the layers that really train, when they do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging

from tests.core.batch_norm.nets import furthest, of_big_batch, statistics
from tests.lit.batch_norm.fits import (
    WINDOW,
    At,
    ConvModule,
    ConvNet,
    StepsByTwo,
    Validated,
    batches,
    fit,
    inputs,
)
from trainkit import BatchNormGuard
from trainkit.core.batch_norm.layers import every_layer, is_training
from trainkit.errors import TrainkitError

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


HOOKS = ["on_train_start", "on_train_epoch_start", "on_fit_start"]


@pytest.mark.parametrize(
    ("policy", "hook"),
    [
        *(("recalibrate", hook) for hook in HOOKS),
        *(("momentum", hook) for hook in HOOKS),
        ("freeze", "on_train_start"),
        ("freeze", "on_fit_start"),
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


@pytest.mark.parametrize("hook", HOOKS)
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


@pytest.mark.parametrize("guard_first", [True, False])
def test_layers_set_free_later_are_replaced(guard_first: bool) -> None:
    guard, unfreezes = BatchNormGuard("group_norm"), Unfreezes()
    first = (guard, unfreezes) if guard_first else (unfreezes, guard)
    module = fit(None, *first)
    assert every_layer(module) == {}


# ---- others --------------------------------------------------------------------------


def test_averaging_that_throws_statistics_away_is_refused_with_freeze() -> None:
    averaging = StochasticWeightAveraging(swa_lrs=0.1)
    with pytest.raises(TrainkitError, match="throws the statistics away"):
        fit("freeze", averaging, max_epochs=3)


def test_windows_of_the_modules_own_size_are_the_ones_that_count() -> None:
    seen: list[float] = []
    note = At("on_train_batch_end", lambda t, m: seen.append(m.net.bn1.momentum))
    fit("momentum", note, module=StepsByTwo(), accumulate=1, exact=False)
    # From the second batch on: the first has said what a window is.
    assert seen[1:6] == pytest.approx([1 - 0.9**0.5] * 5)
    assert seen[6] == pytest.approx(0.1)  # the short last window


def test_layer_is_training_when_it_follows_the_data() -> None:
    layer = copy.deepcopy(ConvNet().bn1)
    assert is_training(layer)
    layer.track_running_stats = False
    assert not is_training(layer)
    layer.track_running_stats = True
    assert not is_training(layer.eval())
