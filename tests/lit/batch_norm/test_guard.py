"""What can be asked of the guard, and what is refused."""

from __future__ import annotations

from functools import cache
from typing import Any, get_args

import pytest
import torch

from tests.helpers import trainer
from tests.lit.batch_norm.fits import At, ConvModule, batches, fit
from trainkit import AccumulationCallback, BatchNormGuard, LRScaling, PerSample
from trainkit.errors import TrainkitError
from trainkit.lit.batch_norm.guard import PolicyName

POLICIES = get_args(PolicyName)


def test_unknown_policy_is_refused() -> None:
    match = r"BatchNormGuard policy: must be one of \['warn', .*received 'melt'"
    with pytest.raises(TrainkitError, match=match):
        BatchNormGuard("melt")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy", "name", "value"),
    [
        ("warn", "min_samples", 0),
        ("warn", "min_samples", 1.5),
        ("recalibrate", "num_batches", 0),
        ("group_norm", "groups", -3),
    ],
)
def test_numbers_out_of_range_are_refused(policy: Any, name: str, value: float) -> None:
    match = f"Guard {name}: must be a .*number of at least 1, received {value!r}"
    with pytest.raises(TrainkitError, match=match):
        BatchNormGuard(policy, **{name: value})  # type: ignore[arg-type]


SMALLEST: dict[str, dict[str, Any]] = {
    "recalibrate": {"num_batches": 1},
    "group_norm": {"groups": 1},
}


@pytest.mark.parametrize("policy", POLICIES)
def test_smallest_numbers_are_taken(policy: Any) -> None:
    BatchNormGuard(policy, min_samples=1, **SMALLEST.get(policy, {}))


@pytest.mark.parametrize(
    ("option", "owner"),
    [
        ({"freeze_affine": True}, "freeze"),
        ({"num_batches": 5}, "recalibrate"),
        ({"exact": False}, "recalibrate"),
        ({"forward": print}, "recalibrate"),
        ({"groups": 8}, "group_norm"),
    ],
)
def test_option_of_another_policy_is_refused(option: Any, owner: str) -> None:
    match = f"{next(iter(option))}: it belongs to the policy '{owner}', and the policy"
    with pytest.raises(TrainkitError, match=match):
        BatchNormGuard("momentum", **option)
    BatchNormGuard(owner, **option)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy", "option"),
    [
        ("recalibrate", {"num_batches": 2.5}),
        ("group_norm", {"groups": 2.5}),
        ("warn", {"min_samples": "4"}),
    ],
)
def test_number_that_must_be_whole_is_refused(policy: Any, option: Any) -> None:
    with pytest.raises(TrainkitError, match="must be a whole number of at least 1"):
        BatchNormGuard(policy, **option)


@pytest.mark.parametrize(
    ("policy", "text"),
    [("sync", r"Trainer\(sync_batchnorm=True\)"), ("renorm", "take 'group_norm'")],
)
def test_policy_that_is_elsewhere_or_gone_says_so(policy: Any, text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        BatchNormGuard(policy)


def test_options_are_given_by_name() -> None:
    with pytest.raises(TypeError, match="positional"):
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

    callbacks = [
        At("on_train_start", look),
        BatchNormGuard("momentum"),
        AccumulationCallback(PerSample()),
        LRScaling("none", reference_batch=4),
    ]
    trainer(3, callbacks=callbacks).fit(ConvModule(), batches())
    assert order.index("AccumulationCallback") < order.index("BatchNormGuard")
    assert order.index("BatchNormGuard") < order.index("At")


def bare() -> ConvModule:
    torch.manual_seed(0)
    parts = [torch.nn.Flatten(), torch.nn.Linear(36, 3)]
    return ConvModule(lambda: torch.nn.Sequential(*parts).double())


@cache
def trained_bare() -> ConvModule:
    return fit(module=bare())


@pytest.mark.parametrize("policy", [p for p in POLICIES if p != "error"])
@pytest.mark.filterwarnings("ignore:BatchNorm. net")
def test_module_without_batch_norm_trains_as_without_the_guard(
    policy: Any, capsys: Any
) -> None:
    module = fit(policy, module=bare())
    said = capsys.readouterr().out
    assert all(map(torch.equal, module.parameters(), trained_bare().parameters()))
    rows = [line for line in said.splitlines() if "BatchNorm" in line]
    assert len(rows) == (policy == "group_norm")


@pytest.mark.parametrize("policy", POLICIES)
def test_guard_outside_of_training_does_nothing_to_statistics(policy: Any) -> None:
    module = ConvModule()
    guard = BatchNormGuard(policy)
    trainer(3, callbacks=[guard]).test(module, batches(), verbose=False)
    for name, buffer in module.named_buffers():
        start = 1.0 if "var" in name else 0.0
        assert buffer.eq(start).all()


def test_guard_saves_nothing_of_its_own() -> None:
    guards = [BatchNormGuard(policy) for policy in POLICIES]
    assert all(guard.state_dict() == {} for guard in guards)
