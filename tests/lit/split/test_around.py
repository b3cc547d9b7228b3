"""trainkit's own callbacks around cut batches."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers import TOLERANCE, deviation, loader, trainer, weights
from tests.lit.split.common import (
    CUTS,
    FIXED,
    SEQUENCES,
    SIZES,
    START,
    Split,
    Table,
    fit,
    pad_and_mask,
)
from trainkit import (
    AccumulationSchedule,
    BatchNormGuard,
    LRScaling,
    PerSample,
    WindowMonitor,
)
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.lit.batch_size.effective import read_effective_batch
from trainkit.lit.logs.plain_comparison import PlainComparison

MANY = (9, 7, 12, 11)


def monitored(module: Split, **options: Any) -> list[dict[str, float]]:
    table = Table()
    monitor = WindowMonitor(every_n_steps=1)
    quiet = {"logger": table, "log_every_n_steps": 1, "max_epochs": 1}
    fit(module, monitor, **quiet | options)
    rows = [row for row in table.rows if "window/loss" in row]
    return [{k.removeprefix("window/"): v for k, v in row.items()} for row in rows]


@pytest.mark.parametrize("cut", ["size", "tokens", "rows"])
def test_monitor_shows_windows_of_whole_loader_batches(cut: str) -> None:
    """Loss, weight, samples and gradient do not depend on the cut; what the cut is
    shows in the number of micro-batches and in the padding."""
    ours, whole = monitored(Split(cut=CUTS[cut])), monitored(Split(cut=None))
    assert len(ours) == len(whole) == len(SIZES)
    for name in ("loss", "weight", "seen", "samples_seen", "grad_norm", "step"):
        values = [row[name] for row in whole]
        assert [row[name] for row in ours] == pytest.approx(values)
    assert [row["samples_seen"] for row in ours] == [14, 31, 40]
    assert all(row["micro_batches"] > 2 for row in ours)
    assert {row["micro_batches"] for row in whole} == {1}
    assert all(row["padding"] < other["padding"] for row, other in zip(ours, whole))  # noqa: B905
    assert all(row["uniform_gap"] > 0.01 for row in ours)


def test_padding_is_that_of_the_micro_batches() -> None:
    """What is computed: rows times the longest of each micro-batch."""
    (row,) = monitored(Split(cut=MicroBatching(size=1)), sizes=(20,))
    assert row["padding"] == 0
    (row,) = monitored(Split(cut=MicroBatching(size=20)), sizes=(20,))
    lengths = [len(x) for x, _ in SEQUENCES[:20]]
    assert row["padding"] == pytest.approx(1 - sum(lengths) / (20 * max(lengths)))


def test_images_have_no_padding_to_show() -> None:
    class Images(Split):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return batch[0].mean() * self.net.head.bias.sum()

    table = Table()
    module = Images(strategy=PerSample())
    data = [(torch.ones(3, 4, 4).double(), 1)] * 12
    monitor = WindowMonitor(every_n_steps=1)
    fitted = trainer(1, logger=table, callbacks=[monitor], log_every_n_steps=1)
    fitted.fit(module, DataLoader(data, batch_size=6))  # type: ignore[arg-type]
    rows = [row for row in table.rows if "window/loss" in row]
    assert rows
    assert all("window/padding" not in row for row in rows)


@pytest.mark.parametrize(("window", "said"), [(1, "is one step, cut"), (2, "is cut")])
def test_the_table_says_what_a_step_is(
    window: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(Split(cut=MicroBatching(size=4, tokens=90)), window=window, max_epochs=1)
    text = f"split: each loader batch {said} into micro-batches of at most 4 rows and"
    assert text in capsys.readouterr().out


@pytest.mark.parametrize("window", [1, 2])
def test_effective_batch_is_that_of_loader_batches(window: int) -> None:
    """Known from the loader, or measured over the first windows, in both units."""
    found = []
    for cut in (FIXED, None):
        module = Split(cut=cut)
        reader = Reader()
        fit(module, reader, window=window, sizes=(10,) * 4, max_epochs=1)
        known = trainer(window, max_epochs=1)
        known.fit(Split(cut=cut), loader(SEQUENCES, 10, collate=pad_and_mask))
        samples = read_effective_batch(known)
        found.append((*reader.found, samples.size))
    assert found[0] == found[1]
    assert found[0][2] == 10 * window


class Reader(pl.Callback):
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        units: Any = ("samples", "tokens")
        self.found = [read_effective_batch(trainer, unit=u).size for u in units]


def test_learning_rate_scaling_goes_by_loader_batches() -> None:
    rates = []
    for cut in (FIXED, None):
        scaling = LRScaling("linear", reference_batch=4)
        fitted = trainer(1, callbacks=[scaling], max_epochs=1)
        fitted.fit(Split(cut=cut), loader(SEQUENCES, 16, collate=pad_and_mask))
        rates.append(fitted.optimizers[0].param_groups[0]["lr"])
    assert rates[0] == rates[1] == 0.5 * 16 / 4


@pytest.mark.parametrize("sizes", [{0: 2, 1: 1}, {0: 1, 1: 2}], ids=str)
def test_schedule_of_windows_equals_that_of_whole_batches(sizes: Any) -> None:
    ends = []
    for cut in (FIXED, None):
        module = Split(cut=cut, optimizer="momentum")
        fitted = fit(module, AccumulationSchedule(sizes), sizes=MANY)
        ends.append(weights(module))
        assert fitted.global_step == 6
    assert deviation(ends[0], ends[1], START) <= TOLERANCE[torch.float64]


def test_plain_comparison_measures_no_cut_batches() -> None:
    """Plain Lightning would not have cut them; whatever is shown must not be wrong."""
    comparison = PlainComparison()
    fit(Split(), comparison)
    assert not comparison.is_measuring
    assert comparison.deviation is None


# ---- BatchNorm -----------------------------------------------------------------------


class Normalised(Split):
    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.norm = nn.BatchNorm1d(3, dtype=torch.float64)
        self.accumulation = PerSample()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.norm(batch[0]).square().mean()


def images() -> DataLoader[Any]:
    data = torch.randn(32, 3, dtype=torch.float64)
    return DataLoader([(x, 0) for x in data], batch_size=16)  # type: ignore[arg-type]


def test_guard_says_how_many_samples_a_statistic_comes_from() -> None:
    """Those of a micro-batch, though the loader yields sixteen."""
    with pytest.warns(UserWarning, match="BatchNorm") as said:
        trainer(1, callbacks=[BatchNormGuard()]).fit(Normalised(), images())
    (text,) = [str(w.message) for w in said if "BatchNorm" in str(w.message)]
    assert " 4 samples" in text
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*BatchNorm")
        trainer(1, callbacks=[BatchNormGuard()]).fit(Normalised(cut=None), images())


def test_guard_corrects_momentum_for_the_parts_of_a_loader_batch() -> None:
    """m' = 1 - (1 - m)^(1/N), for N micro-batches in a step."""
    module = Normalised()
    seen = []
    module.on_train_batch_end = lambda *args: seen.append(module.norm.momentum)  # type: ignore[method-assign,assignment]
    trainer(1, callbacks=[BatchNormGuard("momentum")]).fit(module, images())
    assert seen[-1] == pytest.approx(1 - (1 - 0.1) ** (1 / 4))
