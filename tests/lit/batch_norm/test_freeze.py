"""Frozen statistics stay to the last bit; the guard looks at the layers that really
train, when they do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging

from tests.helpers import trainer
from tests.lit.batch_norm.fits import (
    WINDOW,
    At,
    Builds,
    ConvModule,
    MixinBuilds,
    Validated,
    batches,
    fit,
    inputs,
)
from tests.zoo.small_resnet import furthest, of_big_batch, statistics
from trainkit import BatchNormGuard
from trainkit.core.batch_norm.layers import every_layer
from trainkit.errors import TrainkitError

pytestmark = [
    pytest.mark.filterwarnings("ignore:accumulation. an open window"),
    pytest.mark.filterwarnings("ignore:Found .* module"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but"),
]


def is_frozen(layer: Any) -> bool:
    return "train" in vars(layer)


def pretrained(cls: type[ConvModule] = Validated) -> Any:
    module = cls()
    module.net(batches().dataset.tensors[0])
    return module


THAWS = {
    "on_train_start": lambda module: module.train(),
    "on_train_epoch_start": lambda module: module.net.train(True),
    "on_train_batch_start": lambda module: module.net.bn1.train(),
    "on_train_batch_end": lambda module: module.train(),
}


@pytest.mark.parametrize("hook", THAWS)
def test_statistics_stay_whoever_calls_train(hook: str) -> None:
    """The control: `eval()` by hand lasts until the next `train()`."""
    module, by_hand = pretrained(), pretrained()
    before = statistics(module.net)
    thaw = At(hook, lambda t, m: THAWS[hook](m))
    fit("freeze", thaw, module=module, val=batches(batch_size=27))
    assert furthest(statistics(module.net), before) == 0
    assert module.net.bn1.num_batches_tracked == 1
    by_hand.eval()
    fit(None, thaw, module=by_hand, val=batches())
    assert furthest(statistics(by_hand.net), before) > 1e-2


@pytest.mark.parametrize("affine", [True, False])
def test_weights_of_the_layers_train_unless_they_are_frozen_too(
    affine: bool, capsys: Any
) -> None:
    module = pretrained(ConvModule)
    layers = every_layer(module.net).values()
    for layer in layers if affine else ():
        layer.requires_grad_(False)
    before = [layer.weight.detach().clone() for layer in layers]
    fit("freeze", module=module)
    for layer, weight in zip(layers, before, strict=True):
        assert torch.equal(layer.weight, weight) is affine
    said = capsys.readouterr().out
    assert "BatchNorm: 3 layers frozen, statistics stay as they are" in said


def test_layers_train_again_afterwards() -> None:
    module, guard = pretrained(ConvModule), BatchNormGuard("freeze")
    for _ in range(2):
        before = statistics(module.net)
        fit(guard, module=module)
        assert furthest(statistics(module.net), before) == 0
        assert not any(is_frozen(x) for x in every_layer(module.net).values())
        module.train()
        assert all(layer.training for layer in every_layer(module.net).values())
    before = statistics(module.net)
    fit("ignore", module=module)
    assert furthest(statistics(module.net), before) > 1e-2


def test_layers_train_again_after_an_exception() -> None:
    def fail(trainer: Any, module: Any) -> None:
        assert is_frozen(module.net.bn1)
        raise KeyError("a user's mistake")

    module, guard = pretrained(), BatchNormGuard("freeze")
    with pytest.raises(KeyError, match="a user's mistake"):
        fit(guard, At("on_train_batch_end", fail), module=module)
    assert not is_frozen(module.net.bn1)
    trainer(1, callbacks=[guard]).validate(module, batches(), verbose=False)
    assert not is_frozen(module.net.bn1)


@pytest.mark.parametrize("late", [Builds, MixinBuilds])
def test_layers_made_in_configure_model_are_frozen(late: Any) -> None:
    module = fit("freeze", module=late())
    fresh = statistics(ConvModule().net)
    assert furthest(statistics(module.net), fresh) == 0


def test_frozen_layers_are_not_complained_of() -> None:
    """A last batch of one row is no harm in evaluation mode; warnings are errors."""
    fit("freeze", data=batches(25))


def test_averaging_that_throws_statistics_away_is_refused_with_freeze() -> None:
    averaging = StochasticWeightAveraging(swa_lrs=0.1)
    with pytest.raises(TrainkitError, match="throws the statistics away"):
        fit("freeze", averaging, max_epochs=3)


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


@pytest.mark.parametrize("policy", ["recalibrate", "freeze", "momentum"])
def test_layers_set_free_later_are_treated_as_the_others(policy: str) -> None:
    module, seen = Validated(), list[float]()
    before = statistics(module.net)
    note = At("on_train_batch_end", lambda t, m: seen.append(m.net.bn1.momentum))
    fit(policy, Unfreezes(), note, module=module, val=batches(batch_size=27))
    if policy == "recalibrate":
        wanted = of_big_batch(module.net, inputs(batches()))
        assert furthest(statistics(module.net), wanted) <= EXACT
    if policy == "freeze":
        assert furthest(statistics(module.net), before) == 0
    later = 1 - 0.9 ** (1 / WINDOW) if policy == "momentum" else 0.1
    assert seen[:8] == pytest.approx([0.1] * 7 + [later])
    assert module.net.bn1.momentum == 0.1
