"""A batch that no loader tells is measured over the first windows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.helpers import raise_rank_errors, run_ranks
from tests.lit.rates.scaled import (
    EXACT,
    REFERENCE,
    WINDOW,
    Scheduled,
    data,
    deviation,
    fit,
    linear,
    plain,
    times,
)
from tests.zoo.callbacks import Saving
from trainkit import (
    AccumulationCallback,
    AccumulationSchedule,
    AccumulationStrategy,
    PerSample,
    PerToken,
    Uniform,
    read_effective_batch,
)
from trainkit.errors import TrainkitError

pytestmark = pytest.mark.filterwarnings(
    "ignore:You're resuming from a checkpoint that ended before:UserWarning",
    "ignore:checkpoint. taken inside a window:UserWarning",
    "ignore:checkpoint. it was taken inside a window:UserWarning",
    "ignore:the loader starts again:UserWarning",
)
SIZES = [3, 5, 1, 1, 4, 2, 6, 2, 7, 1, 2, 2, 3, 3, 1, 1, 30, 30, 40, 40]


class Stateful:
    """Batches of sizes that it does not tell; goes on where a checkpoint was taken."""

    def __init__(self) -> None:
        self.given = 0

    def __len__(self) -> int:  # so that Lightning fetches none ahead
        return len(SIZES)

    def __iter__(self) -> Iterator[Tensor]:
        while self.given < len(SIZES):
            self.given += 1
            yield torch.ones(SIZES[self.given - 1], 1, dtype=torch.float64)

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


def run_measured(*more: Any, loader: Any = None, **how: Any) -> tuple[Any, Any]:
    module, scaling = Scheduled(None), linear()
    callbacks = [AccumulationCallback(Uniform()), scaling, *more]
    how = {"loader": loader or Stateful(), "max_epochs": 1, **how}
    return fit(module, *callbacks, **how), scaling


def means(sizes: Sequence[float], windows: int, reference: float) -> list[float]:
    """k before each step: the running mean of a window over the first eight."""
    found = []
    for step in range(1, windows + 1):
        seen = sizes[: 2 * min(step, 8)]
        found.append(sum(seen) / len(seen) * WINDOW / reference)
    return found


def test_measured_curve_equals_the_running_mean_of_eight_windows(capsys: Any) -> None:
    """The first step is already scaled by the window that it belongs to."""
    module, scaling = run_measured()
    ks = means(SIZES, 10, REFERENCE)
    assert deviation(module.curve, times(plain(None, 10), ks)) <= EXACT
    assert scaling.k == pytest.approx(ks[-1])
    said = capsys.readouterr().out.splitlines()
    lines = [line for line in said if "learning" in line]
    assert "follows the first windows, measured; reference 1.5" in lines[0]
    assert "lr 0.05 -> " in lines[1]
    assert len(lines) == 2


@pytest.mark.filterwarnings("ignore:checkpoint. it was taken within an epoch")
def test_measured_run_that_is_resumed_equals_an_unbroken_one(tmp_path: Path) -> None:
    """What was measured is in the checkpoint: so far, or as it came to stay. Then a
    loader that begins again changes nothing more."""
    paths = {after: tmp_path / f"{after}.ckpt" for after in (1, 5, 14, 18)}
    whole, known = run_measured(*(Saving(p, after - 1) for after, p in paths.items()))
    for after, path in paths.items():
        rest, _ = run_measured(ckpt_path=path)
        expected = whole.curve[after // WINDOW :]
        assert deviation(rest.curve, expected) <= EXACT, after

    class Anew(Stateful):
        def load_state_dict(self, state: dict[str, int]) -> None: ...

    rest, scaling = run_measured(loader=Anew(), ckpt_path=paths[18])
    assert all(row == whole.curve[-1] for row in rest.curve)
    assert scaling.k == known.k


@pytest.mark.parametrize("how", [{}, {"micro_batch": 6}])
def test_what_is_known_now_goes_before_the_saved_measure(
    tmp_path: Path, how: dict[str, Any]
) -> None:
    """From a loader that says it, or from the user."""
    path = tmp_path / "one.ckpt"
    batches: Any = [torch.ones(5, 1, dtype=torch.float64)] * 20
    run_measured(Saving(path, 17), loader=DataLoader(batches, batch_size=None))
    scaling = linear(**how)
    fit(Scheduled(None), scaling, ckpt_path=path)
    assert scaling.k == (8.0 if how else 4.0)


# ---- tokens --------------------------------------------------------------------------


class Tokens(Scheduled):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch["labels"].double().clamp(min=0), batch_idx)


def tokens(counts: list[int]) -> Any:
    """Batches of one row with so many valid labels."""
    rows = [torch.arange(40).where(torch.arange(40) < n, -100) for n in counts]
    return DataLoader([{"labels": row} for row in rows], batch_size=1)  # type: ignore[arg-type]


COUNTS = [3, 9, 20, 5, 7, 7, 40, 1, 2, 2, 13, 17, 5, 5, 11, 3, 40, 40, 40, 40]


def by_tokens(counts: list[int], **how: Any) -> list[list[float]]:
    scaling = linear(unit="tokens", reference_batch=10, **how)
    callbacks = [AccumulationCallback(PerToken()), scaling]
    return fit(Tokens(None), *callbacks, loader=tokens(counts), max_epochs=1).curve


def test_tokens_are_measured_over_the_first_windows_unless_they_are_given() -> None:
    ks = means(COUNTS, 10, 10)
    assert deviation(by_tokens(COUNTS), times(plain(None, 10), ks)) <= EXACT
    given = by_tokens(COUNTS, micro_batch=30)
    assert deviation(given, times(plain(None, 10), [6.0] * 10)) <= EXACT


@pytest.mark.filterwarnings("ignore:optimizer step 0 .*weighs anything:UserWarning")
def test_windows_without_a_token_tell_nothing_and_stop_nothing() -> None:
    """Their gradient is 0; the first that holds some is scaled by what was seen."""
    curve = by_tokens([0] * 4 + [6] * 4)
    assert [row[0] for row in curve[:2]] == [0.05, 0.05]
    assert curve[2][0] == pytest.approx(0.05 * (12 / 10) / 3)
    with pytest.raises(TrainkitError, match="nothing says how many tokens"):
        by_tokens([0] * 18)


class PerRow(AccumulationStrategy):
    """Ten tokens a row."""

    def weight(self, batch: Any) -> float:
        return 10.0 * len(batch)


def run_tokens(batch: int, *more: Any, **how: Any) -> Any:
    scaling = linear(unit="tokens", reference_batch=10)
    callbacks = [AccumulationCallback(PerRow()), scaling, *more]
    how = {"loader": data(batch, 20), "max_epochs": 1, **how}
    return fit(Scheduled(None), *callbacks, **how), scaling


@pytest.mark.parametrize(("after", "batch"), [(4, 6), (16, 3), (20, 6)])
def test_measured_tokens_are_carried_over_to_the_same_loader_only(
    tmp_path: Path, after: int, batch: int
) -> None:
    """Another batch size is measured anew, from the first window on."""
    path = tmp_path / "one.ckpt"
    run_tokens(3, Saving(path, after - 1))
    module, scaling = run_tokens(batch, ckpt_path=path, max_epochs=2)
    steps = 20 - after // WINDOW
    k = float(batch * WINDOW)
    assert deviation(module.curve, times(plain(None, steps), [k] * steps)) <= EXACT
    assert scaling.k == k
    asked = read_effective_batch(module.trainer, unit="tokens")
    assert asked.size == 10 * batch * WINDOW


def test_measured_batch_says_so_after_its_window_has_changed() -> None:
    """EffectiveBatch.is_exact, and `(measured over 8 windows)`."""
    schedule = AccumulationSchedule({0: 1, 12: 4}, unit="step")
    _, scaling = run_tokens(3, schedule, window=1, max_epochs=2)
    batch = scaling.effective_batch
    assert batch is not None
    assert (batch.accumulate, batch.size, batch.is_exact) == (4, 120, False)
    assert str(batch).endswith("(measured over 8 windows)")


# ---- what cannot be counted ----------------------------------------------------------


@pytest.mark.parametrize("strategy", [None, PerSample()])
def test_tokens_that_nobody_weighs_are_refused(strategy: Any) -> None:
    callbacks = [AccumulationCallback(strategy)] if strategy is not None else []
    module = Tokens(None)
    with pytest.raises(TrainkitError, match="batch: it is not known in tokens"):
        fit(module, *callbacks, linear(unit="tokens"), loader=tokens(COUNTS))
    assert module.curve == []


class Graphs(Scheduled):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch["nodes"], batch_idx)


@pytest.mark.parametrize("is_given", [True, False])
def test_samples_that_nobody_counts_are_refused_unless_given(is_given: bool) -> None:
    """Tensors with no leading dimension in common; at the first window."""
    batch = {"nodes": torch.ones(5, 1, dtype=torch.float64), "edges": torch.ones(7)}
    loader: Any = DataLoader([batch] * 10, batch_size=None)  # type: ignore[arg-type]
    module = Graphs(None)
    scaling = linear(micro_batch=3) if is_given else linear()
    callbacks = [AccumulationCallback(Uniform()), scaling]
    if is_given:
        fit(module, *callbacks, loader=loader)
        assert deviation(module.curve, times(plain(None, 10), [4.0] * 10)) <= EXACT
        return
    match = "a window has closed.*no leading dimension in common.*micro_batch="
    with pytest.raises(TrainkitError, match=match):
        fit(module, *callbacks, loader=loader)
    assert len(module.curve) <= 1


# ---- several ranks -------------------------------------------------------------------


def train_both(rank: int, world: int) -> dict[str, Any]:
    how: dict[str, Any] = {"strategy": "ddp", "devices": world, "max_epochs": 1}
    how["use_distributed_sampler"] = False
    name = "OneCycleLR-cos"
    samples = fit(Scheduled(name), linear(), loader=data(), **how)
    measured = linear(unit="tokens", reference_batch=10)
    ours = [AccumulationCallback(PerToken()), measured]
    of_rank = fit(Tokens(name), *ours, loader=tokens(COUNTS[rank::world]), **how)
    return {"samples": samples.curve, "tokens": of_rank.curve}


def test_two_ranks_give_twice_the_factor_and_measure_the_same() -> None:
    """Also where they have unequal tokens."""
    both = raise_rank_errors(run_ranks(train_both, 2))
    assert both[0] == both[1]
    measured = [sum(COUNTS[: 4 * n]) / (4 * n) * 4 / 10 for n in range(1, 6)]
    for kind, ks in {"samples": [8.0] * 5, "tokens": measured}.items():
        expected = times(plain("OneCycleLR-cos", 5), ks)
        assert deviation(both[0][kind], expected) <= EXACT
