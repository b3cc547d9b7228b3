"""What can be asked of the guard, and what is refused."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from tests.helpers import trainer
from tests.lit.batch_norm.fits import At, ConvModule, batches, fit
from trainkit import AccumulationCallback, BatchNormGuard, LRScaling, PerSample
from trainkit.errors import TrainkitError
from trainkit.lit.batch_norm.guard import PolicyName

POLICIES = get_args(PolicyName)


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ("melt", {}, r"policy: must be one of \['warn', .*received 'melt'"),
    ("sync", {}, r"Trainer\(sync_batchnorm=True\)"),
    ("renorm", {}, "take 'group_norm'"),
    ("warn", {"min_samples": 0}, "min_samples: .* whole number from 1 to .* 0"),
    ("warn", {"min_samples": 1.5}, "min_samples: .* from 1 to .* received 1.5"),
    ("warn", {"min_samples": "4"}, "min_samples: .* from 1 to .* received '4'"),
    ("recalibrate", {"num_batches": 0}, "num_batches: .* from 1 to .* received 0"),
    ("recalibrate", {"num_batches": 2.5}, "num_batches: .* from 1 to .* received 2.5"),
    ("group_norm", {"groups": -3}, "groups: .* from 1 to .* received -3"),
]


@pytest.mark.parametrize(("policy", "options", "words"), REFUSED)
def test_what_no_guard_can_be_is_refused(
    policy: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(TrainkitError, match=f"BatchNormGuard.*{words}"):
        BatchNormGuard(policy, **options)


@pytest.mark.parametrize(
    ("option", "owner"),
    [
        ({"freeze_affine": True}, "freeze"),
        ({"num_batches": 1}, "recalibrate"),
        ({"exact": False}, "recalibrate"),
        ({"forward": print}, "recalibrate"),
        ({"groups": 1}, "group_norm"),
    ],
)
def test_option_of_another_policy_is_refused(option: Any, owner: str) -> None:
    match = f"{next(iter(option))}: it belongs to the policy '{owner}', and the policy"
    with pytest.raises(TrainkitError, match=match):
        BatchNormGuard("momentum", **option)
    BatchNormGuard(owner, min_samples=1, **option)  # type: ignore[arg-type]


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
