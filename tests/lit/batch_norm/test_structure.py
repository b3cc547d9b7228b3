"""Other layers in BatchNorm's place: before the optimizer, and in every stage."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import nn

from tests.core.batch_norm.nets import ResNet
from tests.helpers import trainer
from tests.lit.batch_norm.fits import At, ConvModule, ConvNet, Validated, batches, fit
from trainkit import (
    AccumulationCallback,
    AccumulationMixin,
    BatchNormGuard,
    PerSample,
)
from trainkit.core.batch_norm.layers import every_layer
from trainkit.errors import TrainkitError

pytestmark = [
    pytest.mark.filterwarnings("ignore:accumulation. an open window"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]

REPLACING: dict[str, type[nn.Module]] = {"group_norm": nn.GroupNorm}
each_policy = pytest.mark.parametrize("policy", REPLACING)


def count(module: nn.Module, kind: type[nn.Module]) -> int:
    return sum(isinstance(m, kind) for m in module.modules())


@each_policy
@pytest.mark.parametrize(("net", "layers"), [(ConvNet, 3), (ResNet, 9)])
def test_every_parameter_of_the_new_layers_is_trained(
    policy: Any, net: Any, layers: int
) -> None:
    module = ConvModule(net)
    before = {name: p for name, p in module.named_parameters()}
    values = {name: p.detach().clone() for name, p in before.items()}
    known: list[set[int]] = []

    def look(trainer: Any, module: Any) -> None:
        groups = trainer.optimizers[0].param_groups
        known.append({id(p) for group in groups for p in group["params"]})

    fit(policy, At("on_train_start", look), module=module)
    assert count(module, REPLACING[policy]) == layers
    assert known == [{id(p) for p in module.parameters()}]
    for name, parameter in module.named_parameters():
        assert parameter is before[name]
        still = "line.bias", "head.bias", "stem.bias", "flat.bias"
        moved = not torch.equal(parameter, values[name])
        assert moved or name.endswith((*still, "conv1.bias", "conv2.bias")), name


def test_nothing_is_replaced_without_the_guard() -> None:
    """The negative control."""
    assert len(every_layer(fit("ignore"))) == 3
    assert len(every_layer(fit())) == 3


def test_steps_with_group_norm_equal_the_big_batchs() -> None:
    """What no BatchNorm can: the law holds to the last digits."""
    ends = {}
    for policy in ("group_norm", "ignore"):
        small = fit(policy, data=batches(24), accumulate=3)
        big = fit(policy, data=batches(24, 12), accumulate=1)
        pairs = zip(small.parameters(), big.parameters(), strict=True)
        ends[policy] = max(float((a - b).detach().abs().max()) for a, b in pairs)
    assert ends["group_norm"] <= 1e-12
    assert ends["ignore"] > 1e-3


@each_policy
def test_checkpoint_fits_in_every_stage(policy: Any, tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, save_last=True)
    module = fit(
        policy, saving, module=Validated(), val=batches(), enable_checkpointing=True
    )
    path = tmp_path / "last.ckpt"
    for stage in ("validate", "test", "predict"):
        other: Any = Validated()
        run = trainer(1, callbacks=[BatchNormGuard(policy)])
        quiet: Any = {} if stage == "predict" else {"verbose": False}
        getattr(run, stage)(other, batches(), ckpt_path=path, **quiet)
        assert count(other, REPLACING[policy]) == 3
        for name, tensor in module.state_dict().items():
            assert torch.equal(other.state_dict()[name], tensor)


def test_checkpoint_of_group_norm_does_not_fit_without_the_guard(
    tmp_path: Path,
) -> None:
    """The negative control."""
    saving = ModelCheckpoint(tmp_path, save_last=True)
    fit("group_norm", saving, enable_checkpointing=True)
    with pytest.raises(RuntimeError, match="running_mean"):
        trainer(1).test(
            ConvModule(), batches(), ckpt_path=tmp_path / "last.ckpt", verbose=False
        )


@each_policy
def test_resumed_training_equals_an_unbroken_one(policy: Any, tmp_path: Path) -> None:
    path = tmp_path / "one.ckpt"

    def save(trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(path)

    whole = fit(policy, At("on_train_epoch_end", save))
    resumed = fit(policy, ckpt_path=path)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], tensor), name


@each_policy
def test_second_fit_replaces_nothing_more(policy: Any) -> None:
    module = fit(policy)
    layers = [m for m in module.modules() if isinstance(m, REPLACING[policy])]
    fit(policy, module=module)
    again = [m for m in module.modules() if isinstance(m, REPLACING[policy])]
    assert [id(m) for m in layers] == [id(m) for m in again]


class WithActivation(nn.BatchNorm2d):
    """As those of timm."""

    def forward(self, input: Any) -> Any:
        return super().forward(input).relu()


class OnlyNamed(nn.BatchNorm2d):
    """Changes nothing of what it does."""


@each_policy
def test_layer_with_a_forward_of_its_own_is_refused(policy: Any) -> None:
    module = ConvModule()
    module.net.bn1 = WithActivation(module.net.bn1.num_features).double()
    match = r"net\.bn1 is a WithActivation\. Its forward\(\) does more"
    with pytest.raises(TrainkitError, match=match):
        fit(policy, module=module)
    module.net.bn1 = OnlyNamed(module.net.bn1.num_features).double()
    assert count(fit(policy, module=module), REPLACING[policy]) == 3


@each_policy
def test_lazy_layer_is_refused(policy: Any) -> None:
    module = ConvModule()
    module.net.bn2 = nn.LazyBatchNorm2d()
    with pytest.raises(TrainkitError, match=r"net\.bn2 is lazy"):
        fit(policy, module=module)


# ---- modules that build themselves ---------------------------------------------------


class Builds(ConvModule):
    def __init__(self) -> None:
        super().__init__(nn.Identity)

    def configure_model(self) -> None:
        if isinstance(self.net, nn.Identity):
            self.net = ConvNet()


class MixinBuilds(AccumulationMixin, Builds):
    accumulation = PerSample()


class BelowMixin(MixinBuilds): ...


class AboveMixin(MixinBuilds):
    def configure_model(self) -> None:
        super().configure_model()
        self.more = nn.BatchNorm1d(3)


@each_policy
@pytest.mark.parametrize(("cls", "layers"), [(MixinBuilds, 3), (BelowMixin, 3)])
def test_layers_of_configure_model_are_replaced_with_the_mixin(
    policy: Any, cls: Any, layers: int
) -> None:
    module = fit(policy, module=cls(), exact=False)
    assert count(module, REPLACING[policy]) == layers


def test_layers_of_an_overriding_configure_model_are_replaced_too() -> None:
    module = fit("group_norm", module=AboveMixin(), exact=False)
    assert count(module, nn.GroupNorm) == 4


@each_policy
def test_layers_of_configure_model_of_a_plain_module_are_refused(policy: Any) -> None:
    match = r"net\.bn1, net\.bn2, net\.bn3 came into Builds in its.*"
    with pytest.raises(TrainkitError, match=match + "AccumulationMixin, or call"):
        fit(policy, module=Builds())


class BuildsInSetup(ConvModule):
    def __init__(self) -> None:
        super().__init__(nn.Identity)

    def setup(self, stage: str) -> None:
        if isinstance(self.net, nn.Identity):
            self.net = ConvNet()


class MixinBuildsInSetup(AccumulationMixin, BuildsInSetup):
    accumulation = PerSample()


@each_policy
def test_layers_of_setup_are_replaced_with_the_mixin(policy: Any) -> None:
    module = fit(policy, module=MixinBuildsInSetup(), exact=False)
    assert count(module, REPLACING[policy]) == 3


@each_policy
def test_layers_of_setup_of_a_plain_module_are_refused(policy: Any) -> None:
    with pytest.raises(TrainkitError, match="BuildsInSetup in its setup or"):
        fit(policy, module=BuildsInSetup())


@each_policy
def test_configure_model_may_convert_by_hand(policy: Any) -> None:
    guard = BatchNormGuard(policy)

    class ByHand(Builds):
        def configure_model(self) -> None:
            super().configure_model()
            guard.convert(self)

    assert count(fit(guard, module=ByHand()), REPLACING[policy]) == 3


def test_configure_model_outside_of_a_trainer_replaces_nothing() -> None:
    module = MixinBuilds()
    module.configure_model()
    assert len(every_layer(module)) == 3


def test_convert_alone_replaces_the_layers_of_any_module() -> None:
    net = ResNet()
    BatchNormGuard("group_norm", groups=2).convert(net)
    assert {m.num_groups for m in net.modules() if isinstance(m, nn.GroupNorm)} == {
        1,
        2,
    }


# ---- averaging -----------------------------------------------------------------------


@each_policy
@pytest.mark.parametrize("at", [0, 1, 2, None])
def test_averaging_before_the_guard_is_refused(policy: Any, at: int | None) -> None:
    """Also where a callback of ours has put them into another order meanwhile."""
    callbacks: list[Any] = [EMAWeightAveraging(), BatchNormGuard(policy)]
    if at is not None:
        callbacks.insert(at, AccumulationCallback(PerSample()))
    with pytest.raises(TrainkitError, match="Put BatchNormGuard before it"):
        trainer(1, callbacks=callbacks).fit(ConvModule(), batches())


@each_policy
def test_averaging_after_the_guard_averages_the_new_layers(policy: Any) -> None:
    averaging = EMAWeightAveraging(decay=0.5)
    module = fit(policy, averaging)
    assert count(module, REPLACING[policy]) == 3
    average: Any = averaging._average_model
    assert average is None or count(average, REPLACING[policy]) == 3


def test_averaging_with_recalibrate_is_told() -> None:
    with pytest.warns(UserWarning, match="WeightAveraging validates and saves"):
        fit("recalibrate", EMAWeightAveraging(decay=0.5))


# ---- the table -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (
            BatchNormGuard("group_norm"),
            r"\(1 with 1 group, 2 with 2 groups\)",
        ),
        (BatchNormGuard("group_norm", groups=1), r"GroupNorm \(3 with 1 group\)"),
    ],
)
def test_table_says_what_was_replaced(policy: Any, text: str, capsys: Any) -> None:
    fit(policy)
    assert re.search(f"BatchNorm: .*{text}", capsys.readouterr().out)
