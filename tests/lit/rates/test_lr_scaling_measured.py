"""A batch that no loader tells is measured over the first windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.core.plan.schedulers import deviation
from tests.helpers import raise_rank_errors, run_ranks
from tests.lit.rates.scaled import (
    EXACT,
    REFERENCE,
    WINDOW,
    Saves,
    Scheduled,
    data,
    fit,
    linear,
    plain,
    times,
)
from trainkit import (
    AccumulationCallback,
    AccumulationMixin,
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


class Sized(torch.utils.data.IterableDataset[torch.Tensor]):
    """Batches of any size, of which no loader knows."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Any:
        return (torch.ones(size, 1, dtype=torch.float64) for size in self.sizes)


def measured(sizes: list[int]) -> Any:
    return torch.utils.data.DataLoader(Sized(sizes), batch_size=None)


SIZES = [3, 5, 1, 1, 4, 2, 6, 2, 7, 1, 2, 2, 3, 3, 1, 1, 30, 30, 40, 40]


def run_measured(path: Path | None = None, *more: Any, **how: Any) -> Any:
    module = Scheduled(None)
    scaling = linear(**how)
    callbacks = [AccumulationCallback(Uniform()), scaling, *more]
    fit(
        module,
        *callbacks,
        loader=measured(SIZES),
        max_epochs=1,
        ckpt_path=path,
    )
    return module, scaling


def means(windows: int) -> list[float]:
    """k before each step: the running mean of a window over the first eight."""
    found = []
    for step in range(1, windows + 1):
        seen = SIZES[: 2 * min(step, 8)]
        found.append(sum(seen) / len(seen) * WINDOW / REFERENCE)
    return found


def test_measured_curve_equals_the_running_mean_of_eight_windows(capsys: Any) -> None:
    """The first step is already scaled by the window that it belongs to."""
    module, scaling = run_measured()
    assert deviation(module.curve, times(plain(None, 10), means(10))) <= EXACT
    assert scaling.k == pytest.approx(means(10)[-1])
    lines = [
        line for line in capsys.readouterr().out.splitlines() if "learning" in line
    ]
    assert "follows the first windows, measured; reference 1.5" in lines[0]
    assert "lr 0.05 -> " in lines[1]
    assert len(lines) == 2


@pytest.mark.filterwarnings("ignore:checkpoint. it was taken within an epoch")
@pytest.mark.parametrize("after", [16, 18])
def test_measured_run_resumed_later_keeps_its_measure(
    tmp_path: Path, after: int
) -> None:
    path = tmp_path / "one.ckpt"
    whole, _ = run_measured(None, Saves(path, after))
    rest, scaling = run_measured(path)
    assert all(row == whole.curve[-1] for row in rest.curve)
    assert scaling.k == pytest.approx(means(10)[-1])


@pytest.mark.filterwarnings("ignore:checkpoint. it was taken within an epoch")
@pytest.mark.parametrize("after", [1, 2, 9])
def test_measured_run_resumed_early_is_scaled_once(tmp_path: Path, after: int) -> None:
    """And saved again before its first window has closed."""
    paths = [tmp_path / "one.ckpt", tmp_path / "two.ckpt"]
    run_measured(None, Saves(paths[0], after))

    class SavesAtOnce(pl.Callback):
        def on_train_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
        ) -> None:
            if not paths[1].exists():
                trainer.save_checkpoint(paths[1])

    for path, more in zip(paths, ([SavesAtOnce()], []), strict=True):
        rest, scaling = run_measured(path, *more)
        factors = [row[0] / 0.05 for row in rest.curve]
        assert factors[-1] == pytest.approx(scaling.k, rel=1e-9)
        assert all(row[1] == pytest.approx(4 * row[0]) for row in rest.curve)


class Stateful:
    """Goes on with the batch that a checkpoint has come to."""

    def __init__(self) -> None:
        self.given = 0

    def __len__(self) -> int:  # so that Lightning fetches none ahead
        return len(SIZES)

    def __iter__(self) -> Any:
        while self.given < len(SIZES):
            self.given += 1
            yield torch.ones(SIZES[self.given - 1], 1, dtype=torch.float64)

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


def test_measured_run_resumed_early_equals_the_uninterrupted_one(
    tmp_path: Path,
) -> None:
    """What was measured so far is in the checkpoint."""

    def run(*more: Any, **how: Any) -> Any:
        callbacks = [linear(), AccumulationCallback(Uniform()), *more]
        how = {"loader": Stateful(), "max_epochs": 1, **how}
        return fit(Scheduled(None), *callbacks, **how).curve

    paths = {after: tmp_path / f"{after}.ckpt" for after in (1, 4, 5, 9, 14)}
    whole = run(*(Saves(path, after) for after, path in paths.items()))
    for after, path in paths.items():
        rest = run(ckpt_path=path)
        assert len(rest) == len(whole) - after // WINDOW
        assert deviation(rest, whole[after // WINDOW :]) <= EXACT, after


class StepsBySix(AccumulationMixin, Scheduled):
    """Manual optimization with windows of a size of its own."""

    accumulation = PerSample()

    def __init__(self) -> None:
        super().__init__(None)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.accumulate(super().training_step(batch, batch_idx), batch)
        if self.window_ends(batch_idx, every=6):
            self.finish_window()
            self.optimizers().step()  # type: ignore[union-attr]
            self.optimizers().zero_grad()  # type: ignore[union-attr]


def test_window_of_its_own_size_is_followed() -> None:
    module = fit(StepsBySix(), linear(reference_batch=3), window=1)
    assert module.effective_batch.accumulate == 6
    assert deviation(module.curve, times(plain(None, 4), [6.0] * 4)) <= EXACT


class Ignored(torch.utils.data.IterableDataset[Any]):
    """Its first windows hold no token that counts."""

    def __init__(self, empty: int) -> None:
        self.empty = empty

    def __iter__(self) -> Any:
        for index in range(24):
            labels = torch.full((2, 3), -100 if index < self.empty else 1)
            yield {"x": torch.ones(2, 1, dtype=torch.float64), "labels": labels}


class OfTokens(Scheduled):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch["x"], batch_idx)


def run_ignored(empty: int) -> list[list[float]]:
    data = DataLoader(Ignored(empty), batch_size=None)
    ours = linear(unit="tokens", reference_batch=6), AccumulationCallback(PerToken())
    return fit(OfTokens(None), *ours, loader=data, max_epochs=1).curve


@pytest.mark.filterwarnings("ignore:optimizer step 0 .*weighs anything:UserWarning")
def test_windows_without_a_token_tell_nothing_and_stop_nothing() -> None:
    """Their gradient is 0; the first that holds some is scaled by what was seen."""
    curve = run_ignored(4)
    assert [row[0] for row in curve[:2]] == [0.05, 0.05]
    assert curve[2][0] == pytest.approx(0.05 * (12 / 6) / 3)
    with pytest.raises(TrainkitError, match="nothing says how many tokens"):
        run_ignored(24)


def test_measure_in_another_unit_is_not_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "one.ckpt"
    run_measured(None, Saves(path, 18))
    rest = fit(Scheduled(None), linear(), ckpt_path=path)  # a loader that says it
    assert deviation(rest.curve[-1:], times(plain(None, 1), [4.0])) <= EXACT


def test_given_micro_batch_goes_before_the_saved_one(tmp_path: Path) -> None:
    path = tmp_path / "one.ckpt"
    fit(Scheduled(None), linear(micro_batch=3), Saves(path, 4))
    scaling = linear(micro_batch=6)
    rest = fit(Scheduled(None), scaling, ckpt_path=path)
    assert scaling.k == 8.0
    assert deviation(rest.curve, times(plain(None, 8), [8.0] * 8)) <= EXACT


# ---- tokens ----------------------------------------------------------------------


class Tokens(Scheduled):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch["labels"].double().clamp(min=0), batch_idx)


def tokens(counts: list[int]) -> Any:
    """Batches of one row with so many valid labels."""
    rows = [torch.arange(40).where(torch.arange(40) < n, -100) for n in counts]
    return DataLoader([{"labels": row} for row in rows], batch_size=1)  # type: ignore[arg-type]


COUNTS = [3, 9, 20, 5, 7, 7, 40, 1, 2, 2, 13, 17, 5, 5, 11, 3, 40, 40, 40, 40]


def test_tokens_are_measured_over_the_first_windows() -> None:
    scaling = linear(unit="tokens", reference_batch=10)
    callbacks = [AccumulationCallback(PerToken()), scaling]
    module = fit(Tokens(None), *callbacks, loader=tokens(COUNTS), max_epochs=1)
    ks = []
    for step in range(1, 11):
        seen = COUNTS[: 2 * min(step, 8)]
        ks.append(sum(seen) / len(seen) * WINDOW / 10)
    assert deviation(module.curve, times(plain(None, 10), ks)) <= EXACT


@pytest.mark.parametrize("strategy", [None, PerSample(), Uniform()])
def test_tokens_that_nobody_weighs_are_refused(strategy: Any) -> None:
    callbacks = [AccumulationCallback(strategy)] if strategy is not None else []
    module = Tokens(None)
    with pytest.raises(TrainkitError, match="batch: it is not known in tokens"):
        fit(module, *callbacks, linear(unit="tokens"), loader=tokens(COUNTS))
    assert module.curve == []


def test_given_tokens_need_no_measuring() -> None:
    scaling = linear(unit="tokens", micro_batch=30, reference_batch=10)
    module = fit(Tokens(None), scaling, loader=tokens(COUNTS), max_epochs=1)
    assert deviation(module.curve, times(plain(None, 10), [6.0] * 10)) <= EXACT


class PerRow(AccumulationStrategy):
    """Ten tokens a row."""

    def weight(self, batch: Any) -> float:
        return 10.0 * len(batch)


def run_tokens(batch: int, *more: Any, **how: Any) -> Any:
    scaling = linear(unit="tokens", reference_batch=10)
    callbacks = [AccumulationCallback(PerRow()), scaling, *more]
    how = {"loader": data(batch, 20), "max_epochs": 1, **how}
    return fit(Scheduled(None), *callbacks, **how), scaling


@pytest.mark.parametrize(("after", "batch"), [(4, 3), (4, 6), (16, 3), (20, 6)])
def test_measured_tokens_are_carried_over_to_the_same_loader_only(
    tmp_path: Path, after: int, batch: int
) -> None:
    """Another batch size is measured anew, from the first window on."""
    path = tmp_path / "one.ckpt"
    run_tokens(3, Saves(path, after))
    module, scaling = run_tokens(batch, ckpt_path=path, max_epochs=2)
    steps = 20 - after // WINDOW
    k = float(batch * WINDOW)
    assert deviation(module.curve, times(plain(None, steps), [k] * steps)) <= EXACT
    assert scaling.k == k
    assert scaling.effective_batch.windows_measured > 0 or (after, batch) != (4, 3)
    asked = read_effective_batch(module.trainer, unit="tokens")
    assert asked.size == 10 * batch * WINDOW


def test_measured_batch_says_so_after_its_window_has_changed() -> None:
    """EffectiveBatch.is_exact, and `(measured over 8 windows)`."""
    scaling = linear(unit="tokens", reference_batch=10)
    schedule = AccumulationSchedule({0: 1, 12: 4}, unit="step")
    callbacks = [AccumulationCallback(PerRow()), schedule, scaling]
    fit(Scheduled(None), *callbacks, loader=data(3, 20), window=1)
    batch = scaling.effective_batch
    assert batch is not None
    assert (batch.accumulate, batch.size, batch.is_exact) == (4, 120, False)
    assert str(batch).endswith("(measured over 8 windows)")


# ---- what cannot be counted ----------------------------------------------------------


class Graphs(Scheduled):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch["nodes"], batch_idx)


def graphs() -> Any:
    """Tensors with no leading dimension in common."""
    batch = {"nodes": torch.ones(5, 1, dtype=torch.float64), "edges": torch.ones(7)}
    return DataLoader([batch] * 10, batch_size=None)  # type: ignore[arg-type]


def test_samples_that_cannot_be_counted_are_refused_at_the_first_window() -> None:
    module = Graphs(None)
    callbacks = [AccumulationCallback(Uniform()), linear()]
    match = "a window has closed.*no leading dimension in common.*micro_batch="
    with pytest.raises(TrainkitError, match=match):
        fit(module, *callbacks, loader=graphs())
    assert len(module.curve) <= 1


def test_given_samples_need_no_counting() -> None:
    callbacks = [AccumulationCallback(Uniform()), linear(micro_batch=3)]
    module = fit(Graphs(None), *callbacks, loader=graphs())
    assert deviation(module.curve, times(plain(None, 10), [4.0] * 10)) <= EXACT


# ---- several ranks -------------------------------------------------------------------


def train_rank(rank: int, world: int, kind: str) -> Any:
    module: Any = Scheduled("OneCycleLR-cos")
    callbacks: list[Any] = [linear()]
    loader = data()
    if kind == "tokens":
        module = Tokens("OneCycleLR-cos")
        callbacks = [
            AccumulationCallback(PerToken()),
            linear(unit="tokens", reference_batch=10),
        ]
        loader = tokens(COUNTS[rank::world])
    how: dict[str, Any] = {"strategy": "ddp", "devices": world, "max_epochs": 1}
    fit(module, *callbacks, loader=loader, use_distributed_sampler=False, **how)
    return module.curve


def train_both(rank: int, world: int) -> dict[str, Any]:
    return {kind: train_rank(rank, world, kind) for kind in ("samples", "tokens")}


@pytest.fixture(scope="module")
def both() -> list[Any]:
    return raise_rank_errors(run_ranks(train_both, 2))


def test_two_ranks_give_twice_the_factor(both: Any) -> None:
    curves = [each["samples"] for each in both]
    assert curves[0] == curves[1]
    assert deviation(curves[0], times(plain("OneCycleLR-cos", 5), [8.0] * 5)) <= EXACT


def test_ranks_with_unequal_tokens_measure_the_same(both: Any) -> None:
    curves = [each["tokens"] for each in both]
    assert curves[0] == curves[1]
    ks = [sum(COUNTS[: 4 * n]) / (4 * n) * 4 / 10 for n in range(1, 6)]
    assert deviation(curves[0], times(plain("OneCycleLR-cos", 5), ks)) <= EXACT
