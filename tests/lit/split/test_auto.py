"""The size is found while the training runs, and shown."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers import deviation, trainer, weights
from tests.lit.fronts import windows_of
from tests.lit.split.common import START, Split, Table, fit
from tests.lit.split.short_of_memory import Memory, Short
from trainkit import AccumulationMixin, PerSample, WindowMonitor
from trainkit.core.split import search
from trainkit.core.split.micro_batching import MicroBatching

EXACT = 1e-9


class Cuts(pl.Callback):
    """Writes down the padded tokens of each micro-batch, by loader batch."""

    def __init__(self) -> None:
        self.sizes: list[list[int]] = []

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.sizes.append([])

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self.sizes[-1].append(pl_module.ran)


class Sized(Short):
    ran = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.ran = batch["ids"].numel()
        return super().training_step(batch, batch_idx)


def test_it_begins_small_and_runs_the_largest_first() -> None:
    cuts = Cuts()
    fit(Sized(cut=MicroBatching("auto")), cuts, max_epochs=8)
    assert len(cuts.sizes[0]) > 1
    for sizes in cuts.sizes:
        assert sizes == sorted(sizes, reverse=True)


def test_start_is_the_first_limit() -> None:
    cuts = Cuts()
    fit(Sized(cut=MicroBatching("auto", start=50)), cuts)
    assert 40 < max(cuts.sizes[0]) <= 50


def test_a_search_that_goes_on_and_one_that_ends_are_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr("trainkit.lit.split.auto.rank_zero_info", said.append)
    module, whole = Short(cut=MicroBatching("auto")), Short(cut=None)
    fitted = fit(module, max_epochs=20)  # 60 windows
    fit(whole, max_epochs=20)
    split: Any = windows_of(fitted).split
    assert not split.sizes.search.is_searching
    assert deviation(module, whole, START) <= EXACT
    (line,) = said
    assert f"micro-batches of at most {split.sizes.search.limit} tokens" in line


def test_a_larger_loader_batch_later_is_cut_by_what_was_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(search, "SHARE", 1)
    monkeypatch.setattr(search, "FASTER", 1e9)
    cuts, sizes = Cuts(), (5, 5, 5, 5, 20)
    module, whole = Sized(cut=MicroBatching("auto")), Split(cut=None)
    fit(module, cuts, sizes=sizes, max_epochs=1)
    fit(whole, sizes=sizes, max_epochs=1)
    first = sum(cuts.sizes[0])
    assert len(cuts.sizes[0]) == 1
    assert len(cuts.sizes[4]) > 1
    assert max(cuts.sizes[4]) <= first
    assert deviation(module, whole, START) <= EXACT


def of(table: Table, name: str) -> list[float]:
    return [row[name] for row in table.rows if name in row]


def test_the_size_is_logged_with_the_window_that_was_cut_so() -> None:
    table, cuts = Table(), Cuts()
    module = Sized(Memory(fits={0: 100, 2: 50}), cut=MicroBatching("auto"))
    fit(module, WindowMonitor(1), cuts, logger=table, log_every_n_steps=1)
    rows = of(table, "window/micro_batch_size")
    assert len(rows) == 6
    for size, ran in zip(rows, cuts.sizes, strict=True):
        assert ran[-1] <= size
    assert rows[2] <= 50


def test_a_size_that_was_said_is_not_logged() -> None:
    table = Table()
    fit(Split(), WindowMonitor(1), logger=table, log_every_n_steps=1)
    assert of(table, "window/weight")
    assert not of(table, "window/micro_batch_size")


# ---- batches without lengths ---------------------------------------------------------


class Images(AccumulationMixin, pl.LightningModule):
    accumulation = PerSample()

    def __init__(self, fits: int, cut: MicroBatching | None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Linear(12, 2, dtype=torch.float64)
        self.fits, self.micro_batching = fits, cut
        self.rows: set[int] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, labels = batch
        if len(images) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.rows.add(len(images))
        return nn.functional.cross_entropy(self.net(images.flatten(1)), labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def test_images_are_cut_by_rows() -> None:
    torch.manual_seed(0)
    data = [(torch.randn(3, 2, 2).double(), i % 2) for i in range(40)]
    ends = []
    for fits, cut in ((5, MicroBatching("auto")), (99, None)):
        module = Images(fits, cut)
        start = weights(module)
        loader: Any = DataLoader(data, batch_size=16)  # type: ignore[arg-type]
        fitted = trainer(max_epochs=3)
        fitted.fit(module, loader)
        ends.append(module)
        assert max(module.rows) <= fits
    assert deviation(ends[0], ends[1], start) <= EXACT
