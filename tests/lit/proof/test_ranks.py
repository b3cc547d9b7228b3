"""Two ranks rehearse alone, and say one verdict by both doors."""

from __future__ import annotations

import contextlib
import io
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import trainkit
from tests.helpers import raise_rank_errors, run_ranks, trainer
from tests.lit.proof.starting import ALARM, SPLIT, fit, images, tokens
from tests.lit.proof.test_start import BATCH_NORM, IMAGES, INSIDE
from tests.zoo import causes
from tests.zoo.causes import NormalisedTokens, Tokens
from tests.zoo.wrongs import ClipsEarly
from trainkit import BatchNormGuard, PerSample, PerToken, Report, TrainkitError
from trainkit.lit.proof.measure import of_all_ranks


class FussyOnOne(Tokens):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        if self.global_rank == 1 and len(batch["ids"]) < 8:
            raise ValueError("only here")
        return super().training_step(batch, batch_idx)


class UnlikeOnOne(Tokens):
    """One rank trains another loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.loss = causes.row_mean if self.global_rank == 1 else causes.token_mean
        return super().training_step(batch, batch_idx)


class Exchanges(UnlikeOnOne):
    """It sums over ranks by itself, and one of them rehearses more often."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ranks = torch.ones(())
        torch.distributed.all_reduce(ranks)
        return super().training_step(batch, batch_idx) * ranks


class Gathers(Tokens):
    def features(self, batch: Any) -> Any:
        everywhere: Any = self.all_gather(super().features(batch))
        return everywhere


class Coupled(Tokens):
    """So little that float32 cannot tell it from rounding."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        across = self.features(batch)[:, 0].mean(0).square().sum()
        return super().training_step(batch, batch_idx) + 3e-5 * across


# The module, its strategy and cut; the kind of the cause, if it is not exact.
CASES: dict[str, tuple[Any, ...]] = {
    "exact": (Tokens, PerToken(), None, None),
    "exact, split": (Tokens, PerToken(), SPLIT, None),
    "inner cut": (IMAGES, None, INSIDE, None),
    "another strategy": (Tokens, PerSample(), None, "denominator"),
    "BatchNorm, split": (NormalisedTokens, PerToken(), SPLIT, "rows"),
    "a hook": (ClipsEarly, PerToken(), None, "order"),
    "coupled a little": (Coupled, PerToken(), None, "loss"),
    "unlike on one rank": (UnlikeOnOne, PerToken(), None, "denominator"),
    "exchanges": (Exchanges, PerToken(), None, "denominator"),
}
RANKS: dict[str, Any] = {"strategy": "ddp", "devices": 2}


def checked(make: Any, strategy: Any, cut: Any) -> Any:
    data, ddp = images(15) if cut is INSIDE else tokens(), trainer(**RANKS)
    how = {"strategy": strategy, "micro_batches": cut}
    report = trainkit.check(make(), data, trainer=ddp, **how)
    return report.exact, [c.kind for c in report.causes], str(report)


def started(make: Any, strategy: Any, cut: Any, **how: Any) -> tuple[str, list[str]]:
    """What is printed, and what is warned of."""
    data, out = images(15) if cut is INSIDE else tokens(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        how = {**RANKS, "limit_train_batches": 2, "accumulate": 1, **how}
        fit(make(), data, strategy, cut, **how)
    alarms = [str(w.message) for w in caught if ALARM in str(w.message)]
    lines = [line for line in out.getvalue().split("\n") if "proof:" in line]
    return "; ".join(lines), alarms


def refused(door: Any, *args: Any, **how: Any) -> str:
    try:
        return str(door(*args, **how))
    except (TrainkitError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def on_a_rank(rank: int, world_size: int) -> dict[str, Any]:
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    for name, (make, strategy, cut, _) in CASES.items():
        how = make, strategy, cut
        found[name] = checked(*how), started(*how)
    fussy, unlike = (FussyOnOne, PerToken(), None), (UnlikeOnOne, PerToken(), None)
    guards = (BatchNormGuard("exact"),)
    found["an error on one rank"] = refused(checked, *fussy), refused(started, *fussy)
    found["required"] = refused(started, *unlike, proof="require")
    found["gathers"] = checked(Gathers, PerToken(), None)
    how = BATCH_NORM, PerSample(), INSIDE
    found["exact BatchNorm"] = started(*how, callbacks=guards)[0]
    return found


def test_both_ranks_say_what_one_has_found() -> None:
    """With windows of one loader batch, each rank's share is a micro-batch."""
    one, other = raise_rank_errors(run_ranks(on_a_rank, 2))
    for name, (*_, kind) in CASES.items():
        report, (line, alarms) = one[name]
        assert report[:2] == (kind is None, [kind] * (kind is not None)), name
        assert other[name] == (report, ("", [])), name
        assert ("exact on " in line, len(alarms)) == (kind is None, int(bool(kind)))
    (report, (_, alarms)) = one["unlike on one rank"]
    assert "these are rank 1's" in report[2]
    assert "proof: on rank 1, a window of this training is not the" in alarms[0]
    ours, theirs = one["an error on one rank"], other["an error on one rank"]
    assert theirs[0].startswith("ValueError: only here")
    assert ours[0].startswith("TrainkitError: check: rank 1 failed: ")
    assert "only here" in ours[0]
    assert "on rank 1, not measured: ValueError: only here" in ours[1]
    # Each rank rehearses alone, so nothing waits.
    assert one["gathers"][:2] == other["gathers"][:2] == (True, [])
    assert "BatchNorm sees all ranks" in one["exact BatchNorm"]
    assert other["exact BatchNorm"] == ""
    assert ALARM in one["required"]
    assert ALARM in other["required"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_off_is_shown_before_one_that_cannot_tell(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    off = Report(False, 0.1, 0.0, 8, "float32", ())
    both = [replace(off, deviation=0.9, doubt="nothing says where rows end")]
    both.insert(rank, off)

    def gather(each: list[Any], own: Any) -> None:
        each[:] = both

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    assert of_all_ranks(SimpleNamespace(world_size=2), lambda: both[0]) == (off, rank)
