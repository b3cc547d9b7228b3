"""What can be asked of the guard; other layers in BatchNorm's place."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import nn

from tests.helpers import trainer
from tests.lit.batch_norm.fits import (
    At,
    Builds,
    BuildsInSetup,
    ConvModule,
    MixinBuilds,
    Validated,
    batches,
    fit,
)
from trainkit import (
    AccumulationCallback,
    BatchNormGuard,
    LRScaling,
    PerSample,
    exact_batch_norm,
)
from trainkit.core.batch_norm.layers import every_layer
from trainkit.errors import TrainkitError
from trainkit.lit.batch_norm.guard import PolicyName

pytestmark = [
    pytest.mark.filterwarnings("ignore:accumulation. an open window"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]

POLICIES = get_args(PolicyName)


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ("melt", {}, r"policy: must be one of \['warn', .*received 'melt'"),
    (["warn"], {}, r"policy: must be the name of one, received \['warn'\]"),
    ("sync", {}, r"Trainer\(sync_batchnorm=True\)"),
    ("warn", {"min_samples": 0}, "min_samples: .* whole number from 1 to .* 0"),
    ("warn", {"min_samples": 1.5}, "min_samples: .* from 1 to .* received 1.5"),
    ("warn", {"min_samples": "4"}, "min_samples: .* from 1 to .* received '4'"),
    ("recalibrate", {"num_batches": 0}, "num_batches: .* from 1 to .* received 0"),
    ("recalibrate", {"num_batches": 2.5}, "num_batches: .* from 1 to .* received 2.5"),
    ("group_norm", {"groups": -3}, "groups: .* from 1 to .* received -3"),
]


@pytest.mark.parametrize(("policy", "options", "words"), REFUSED)
def test_no_other_guard_is_taken(
    policy: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(TrainkitError, match=f"BatchNormGuard.*{words}"):
        BatchNormGuard(policy, **options)


@pytest.mark.parametrize(
    ("option", "owner"),
    [
        ({"num_batches": 1}, "recalibrate"),
        ({"exact": False}, "recalibrate"),
        ({"groups": 1}, "group_norm"),
    ],
)
def test_option_of_another_policy_is_refused(option: Any, owner: str) -> None:
    match = f"{next(iter(option))}: it belongs to the policy '{owner}', and the policy"
    with pytest.raises(TrainkitError, match=match):
        BatchNormGuard("momentum", **option)
    BatchNormGuard(owner, min_samples=1, **option)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="positional"):  # they are given by name
        BatchNormGuard("warn", 16)  # type: ignore[misc]


def test_two_guards_are_refused() -> None:
    guards = [BatchNormGuard("momentum"), BatchNormGuard("warn")]
    match = r"one guard at a time, and 2 are .*\['momentum', 'warn'\]"
    with pytest.raises(TrainkitError, match=match):
        trainer(1, callbacks=guards).fit(ConvModule(), batches())


def test_guard_stands_behind_ours_and_before_all_others() -> None:
    order: list[str] = []

    def look(trainer: Any, module: Any) -> None:
        order.extend(type(c).__name__ for c in trainer.callbacks)

    ours = AccumulationCallback(PerSample()), LRScaling("none", reference_batch=4)
    callbacks = [At("on_train_start", look), BatchNormGuard("momentum"), *ours]
    trainer(3, callbacks=callbacks).fit(ConvModule(), batches())
    assert order.index("AccumulationCallback") < order.index("BatchNormGuard")
    assert order.index("BatchNormGuard") < order.index("At")


@pytest.mark.filterwarnings("ignore:BatchNorm. net")
def test_module_without_batch_norm_trains_as_without_the_guard(capsys: Any) -> None:
    def bare() -> ConvModule:
        torch.manual_seed(0)
        parts = [torch.nn.Flatten(), torch.nn.Linear(36, 3)]
        return ConvModule(lambda: torch.nn.Sequential(*parts).double())

    plain = fit(module=bare())
    for policy in POLICIES:
        module = fit(policy, module=bare())
        said = capsys.readouterr().out
        assert all(map(torch.equal, module.parameters(), plain.parameters()))
        rows = [line for line in said.splitlines() if "BatchNorm" in line]
        assert len(rows) == (policy == "group_norm")


def test_guard_outside_of_training_changes_and_saves_nothing() -> None:
    for policy in POLICIES:
        module, guard = ConvModule(), BatchNormGuard(policy)
        trainer(3, callbacks=[guard]).test(module, batches(), verbose=False)
        for name, buffer in module.named_buffers():
            assert buffer.eq(1.0 if "var" in name else 0.0).all()
        assert guard.state_dict() == {}


POLICY = "group_norm"


def count(module: nn.Module) -> int:
    return sum(isinstance(m, nn.GroupNorm) for m in module.modules())


def test_steps_with_group_norm_equal_the_big_batchs() -> None:
    """What no BatchNorm can: the law holds to the last digits."""
    known: list[set[int]] = []

    def look(trainer: Any, module: Any) -> None:
        groups = trainer.optimizers[0].param_groups
        known.append({id(p) for group in groups for p in group["params"]})

    ends = {}
    for policy in ("group_norm", "ignore"):
        at_start = At("on_train_start", look)
        small = fit(policy, at_start, data=batches(24), accumulate=3)
        assert known.pop() == {id(p) for p in small.parameters()}
        big = fit(policy, data=batches(24, 12), accumulate=1)
        assert len(every_layer(small)) == (0 if policy == POLICY else 3)
        pairs = zip(small.parameters(), big.parameters(), strict=True)
        ends[policy] = max(float((a - b).detach().abs().max()) for a, b in pairs)
    assert ends["group_norm"] <= 1e-12
    assert ends["ignore"] > 1e-3


def test_checkpoint_fits_in_every_stage_and_resumes(tmp_path: Path) -> None:
    """The control: without the guard it does not fit."""
    saving = ModelCheckpoint(tmp_path, save_last=True, every_n_epochs=1)
    module = fit(POLICY, saving, enable_checkpointing=True, max_epochs=1)
    path, data = tmp_path / "last.ckpt", batches()
    for stage in ("validate", "test", "predict"):
        other: Any = Validated()
        run = trainer(1, callbacks=[BatchNormGuard(POLICY)])
        quiet: Any = {} if stage == "predict" else {"verbose": False}
        getattr(run, stage)(other, data, ckpt_path=path, **quiet)
        assert count(other) == 3
        for name, tensor in module.state_dict().items():
            assert torch.equal(other.state_dict()[name], tensor)
    with pytest.raises(RuntimeError, match="running_mean"):
        trainer(1).test(ConvModule(), data, ckpt_path=path, verbose=False)
    resumed, whole = fit(POLICY, ckpt_path=path), fit(POLICY)
    assert all(map(torch.equal, resumed.parameters(), whole.parameters()))
    layers = [m for m in whole.modules() if isinstance(m, nn.GroupNorm)]
    fit(POLICY, module=whole)  # replaces nothing more
    assert layers == [m for m in whole.modules() if isinstance(m, nn.GroupNorm)]


class WithActivation(nn.BatchNorm2d):
    """As those of timm."""

    def forward(self, input: Any) -> Any:
        return super().forward(input).relu()


def test_layers_that_cannot_be_replaced_are_refused() -> None:
    module = ConvModule()
    module.net.bn1 = WithActivation(module.net.bn1.num_features).double()
    match = r"net\.bn1 is a WithActivation\. Its forward\(\) does more"
    with pytest.raises(TrainkitError, match=match):
        fit(POLICY, module=module)
    module = ConvModule()
    module.net.bn2 = nn.LazyBatchNorm2d()
    with pytest.raises(TrainkitError, match=r"net\.bn2 is a LazyBatchNorm2d"):
        fit(POLICY, module=module)


# ---- modules that build themselves ---------------------------------------------------


@pytest.mark.parametrize("cls", [Builds, BuildsInSetup, MixinBuilds])
def test_late_layers_are_refused(cls: Any) -> None:
    said = rf"net\.bn1, net\.bn2, net\.bn3 came into {cls.__name__} in its setup"
    with pytest.raises(TrainkitError, match=said + r".*Call guard.convert\(self\)"):
        fit(POLICY, module=cls())


def test_configure_model_may_convert_by_hand() -> None:
    guard = BatchNormGuard(POLICY)

    class ByHand(Builds):
        def configure_model(self) -> None:
            super().configure_model()
            guard.convert(self)

    assert count(fit(guard, module=ByHand())) == 3


# ---- averaging -----------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, None])
def test_averaging_before_the_guard_is_refused(at: int | None) -> None:
    """Also where a callback of ours has put them into another order meanwhile."""
    callbacks: list[Any] = [EMAWeightAveraging(), BatchNormGuard(POLICY)]
    if at is not None:
        callbacks.insert(at, AccumulationCallback(PerSample()))
    with pytest.raises(TrainkitError, match="Put BatchNormGuard before it"):
        trainer(1, callbacks=callbacks).fit(ConvModule(), batches())


def test_averaging_after_the_guard_averages_the_new_layers() -> None:
    averaging = EMAWeightAveraging(decay=0.5)
    module = fit(POLICY, averaging)
    assert count(module) == 3
    average: Any = averaging._average_model
    assert average is None or count(average) == 3


@pytest.mark.parametrize(
    "callback",
    [EMAWeightAveraging(decay=0.5), ModelCheckpoint(save_weights_only=True)],
)
def test_what_saves_other_statistics_than_recalibrated_ones_is_told(
    callback: Any, tmp_path: Path
) -> None:
    how = {"enable_checkpointing": True, "default_root_dir": tmp_path}
    words = f"may have others: received {type(callback).__name__}. Save with"
    with pytest.warns(UserWarning, match=words):
        fit("recalibrate", callback, **how)


# ---- the table -----------------------------------------------------------------------


def test_table_says_what_was_replaced(capsys: Any) -> None:
    fit(BatchNormGuard(POLICY, groups=1), max_epochs=1)
    assert "GroupNorm (3 with 1 group)" in capsys.readouterr().out
    fit(POLICY, max_epochs=1)
    assert "GroupNorm (1 with 1 group, 2 with 2 groups)" in capsys.readouterr().out


def test_the_option_memory_of_earlier_versions_is_taken_and_named_as_idle() -> None:
    with pytest.warns(UserWarning, match="memory= has no effect any more"):
        BatchNormGuard("exact", memory="host")
    with pytest.warns(UserWarning, match="exact_batch_norm: memory= has no effect"):
        exact_batch_norm(nn.BatchNorm1d(3), size=2, memory="device")
