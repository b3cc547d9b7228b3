"""trainkit's own callbacks around cut batches."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers import deviation, trainer, weights
from tests.lit.split.common import CUTS, FIXED, SEQUENCES, SIZES, Split, fit, samples
from tests.zoo.callbacks import Table
from tests.zoo.modules import hooked, pad_and_mask
from trainkit import BatchNormGuard, LRScaling, MicroBatching, PerSample, WindowMonitor
from trainkit.lit.batch_size.effective import read_effective_batch
from trainkit.lit.logs.summary import PlainComparison


def monitored(module: Split, **options: Any) -> list[dict[str, float]]:
    table = Table()
    quiet = {"logger": table, "log_every_n_steps": 1, "max_epochs": 1}
    fit(module, WindowMonitor(every_n_steps=1), **quiet | options)
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
    assert {row["micro_batches"] for row in whole} == {1}
    for row, other in zip(ours, whole, strict=True):
        assert row["micro_batches"] > 2
        assert row["uniform_gap"] > 0.01
        assert row["padding"] < other["padding"]
        assert "micro_batch_size" not in row  # it was said


def test_padding_is_that_of_the_micro_batches() -> None:
    """What is computed: rows times the longest of each micro-batch."""
    (row,) = monitored(Split(cut=MicroBatching(size=1)), sizes=(20,))
    assert row["padding"] == 0
    (row,) = monitored(Split(cut=MicroBatching(size=20)), sizes=(20,))
    lengths = [len(x) for x, _ in SEQUENCES[:20]]
    assert row["padding"] == pytest.approx(1 - sum(lengths) / (20 * max(lengths)))


class Normalised(Split):
    """Learns from rows of numbers, which have no padding."""

    def __init__(self, **how: Any) -> None:
        super().__init__(strategy=PerSample(), **how)
        self.norm = nn.BatchNorm1d(3, dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.norm(batch[0]).square().mean()


def images() -> DataLoader[Any]:
    data = torch.randn(32, 3, dtype=torch.float64)
    return DataLoader([(x, 0) for x in data], batch_size=16)  # type: ignore[arg-type]


def test_rows_without_lengths_have_no_padding_to_show() -> None:
    rows = monitored(Normalised(), data=images())
    assert rows
    assert all("padding" not in row for row in rows)


@pytest.mark.parametrize(("tokens", "times"), [(9, 1), (90, 0)])
def test_a_row_above_the_budget_is_said_once_and_trains(
    tokens: int, times: int
) -> None:
    fit(whole := Split(cut=None), max_epochs=1)
    with warnings.catch_warnings(record=True) as said:
        warnings.filterwarnings("always", ".*exceeds the budget")
        fit(module := Split(cut=MicroBatching(tokens=tokens)), max_epochs=1)
    assert len(said) == times
    assert deviation(module, whole, weights(Split())) <= 1e-9


@pytest.mark.parametrize(("window", "said"), [(1, "is one step, cut"), (2, "is cut")])
def test_the_table_says_what_a_step_is(
    window: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(Split(cut=MicroBatching(size=4, tokens=90)), window=window, max_epochs=1)
    text = f"split: each loader batch {said} into micro-batches of at most 4 rows and"
    assert text in capsys.readouterr().out


@pytest.mark.parametrize("window", [1, 2])
def test_effective_batch_and_rates_are_those_of_loader_batches(window: int) -> None:
    """Known from the loader, or measured over the first windows, in both units."""
    found = []
    for cut in (FIXED, None):
        read: list[float] = []

        def keep(fitted: Any, module: Any, read: list[float] = read) -> None:
            units: Any = ("samples", "tokens")
            read += [read_effective_batch(fitted, unit=u).size for u in units]

        reader = LambdaCallback(on_train_end=keep)
        fit(Split(cut=cut), reader, window=window, sizes=(10,) * 4, max_epochs=1)
        scaling = LRScaling("linear", reference_batch=4)
        known = trainer(window, max_epochs=1, callbacks=[scaling])
        known.fit(Split(cut=cut), samples(10, pad_and_mask))
        rate = known.optimizers[0].param_groups[0]["lr"]
        found.append((*read, read_effective_batch(known).size, rate))
    assert found[0] == found[1]
    assert found[0][2:] == (10 * window, 0.5 * 10 * window / 4)


def test_plain_comparison_measures_no_cut_batches() -> None:
    """Plain Lightning would not have cut them; whatever is shown must not be wrong."""
    fit(Split(), comparison := PlainComparison())
    assert not comparison.is_measuring
    assert comparison.deviation is None


def test_guard_says_how_many_samples_a_statistic_comes_from() -> None:
    """Those of a micro-batch, though the loader yields sixteen."""
    module = hooked(Normalised, proof="off")()  # which names BatchNorm too
    with pytest.warns(UserWarning, match="BatchNorm") as said:
        fit(module, BatchNormGuard(), data=images())
    (text,) = [str(w.message) for w in said if "BatchNorm" in str(w.message)]
    assert " 4 samples" in text
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*BatchNorm")
        fit(Normalised(cut=None), BatchNormGuard(), data=images())


def test_guard_corrects_momentum_for_the_parts_of_a_loader_batch() -> None:
    """m' = 1 - (1 - m)^(1/N), for N micro-batches in a step."""
    module, seen = Normalised(), list[Any]()
    keep = LambdaCallback(
        on_train_batch_end=lambda *args: seen.append(module.norm.momentum)
    )
    fit(module, keep, BatchNormGuard("momentum"), data=images())
    assert seen[-1] == pytest.approx(1 - (1 - 0.1) ** (1 / 4))
