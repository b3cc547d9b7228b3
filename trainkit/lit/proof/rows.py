"""A few rows of the training data, as batches of any of them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from trainkit.core.split.cutting import Cutter
from trainkit.core.split.fields import take_apart
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.strategies import AccumulationStrategy, PerSample
from trainkit.lit._compat import before_batch_transfer
from trainkit.lit.measure.calls import MeasuredCalls
from trainkit.lit.measure.draws import Draws
from trainkit.lit.probe.rows import LEAST, Rows, num_elements


class FewRows:
    """Rows of the loader, of unlike lengths where there are such.

    Rows of a `DataLoader` are read one by one, and its collate function makes batches
    of them. From any other loader, the rows are those of its first batch, and batches
    are cut from it.

    Args:
        trainer: in `fit`, about to run its first batch.
        module: what it trains.
        first_batch: the first batch, on the device.
        most: how many rows at most.
        options: how split windows cut; None for streamed ones.
        strategy: tells the rows' lengths.
        trims: whether split windows leave out columns of padding.

    Attributes:
        num_rows: how many there are.
        is_split: whether the run cuts loader batches.
        can_collate: whether batches are made anew of single rows.
    """

    def __init__(
        self,
        trainer: Any,
        module: Any,
        first_batch: Any,
        *,
        most: int,
        options: MicroBatching | None = None,
        strategy: AccumulationStrategy | None = None,
        trims: bool = True,
    ) -> None:
        self._trainer, self._module, self._trims = trainer, module, trims
        self._default = torch.get_default_dtype()
        self._samples = _samples(trainer.train_dataloader, most)
        self.is_split = options is not None
        self._options = options
        self._size = getattr(trainer.train_dataloader, "batch_size", None) or most
        cuts = options or MicroBatching(size=1)
        self._collate = getattr(trainer.train_dataloader, "collate_fn", None)
        self._cuts_samples = cuts.collate is not None
        if self._cuts_samples:
            self._collate = cuts.collate
            self._samples = self._samples or list(first_batch)[:most]
            cuts = MicroBatching(size=1)  # what is collated is cut as any batch
        self.can_collate = bool(self._samples)
        self._cutter = Cutter(cuts, strategy or PerSample())
        self._numbers: list[int] | None = None
        if self.can_collate:
            self._whole = self._collated(range(len(self._samples)))
            self.num_rows = len(self._samples)
        else:
            self._whole = first_batch
            self.num_rows = self._cutter.measure(first_batch).num_rows
            self._choose(most)
        self._draws = Draws(self.num_rows)

    @functools.cached_property
    def redrawn(self) -> str:
        """The path of a field whose values for a row change with the batch that it is
        collated in, such as noise; "" if there is none."""
        if not (self.can_collate and self.can_cut):
            return ""
        rows = list(range(0, self.num_rows, 2))
        pair = self._cutter.pair(self._whole, rows)[0], self._collated(rows)
        for (path, one), (_, other) in zip(*map(_fields, pair), strict=False):
            both = isinstance(one, Tensor) and isinstance(other, Tensor)
            if both and one.shape == other.shape and not torch.equal(one, other):
                return path
        return ""

    @functools.cached_property
    def can_cut(self) -> bool:
        """Whether the whole can be cut, so that its parts are padded alike."""
        try:
            rows = self._cutter.measure(self._whole).num_rows
        except Exception:
            return False
        return rows == self.num_rows or self._numbers is not None

    def as_run(self, rows: Sequence[int]) -> Any:
        """Some rows as the run would give them to `training_step`."""
        if self.is_split and not self._cuts_samples:
            return self.trimmed(rows) if self._trims else self.padded_alike(rows)
        return self.collated(rows)

    def others(self, rows: Sequence[int]) -> tuple[Any, Sequence[int]]:
        """A batch of the rows that are not among some, and which they are."""
        rest = [row for row in range(self.num_rows) if row not in rows]
        return self.as_run(rest), rest

    def whole(self) -> Any:
        """All rows as one batch, as `training_step` gets it."""
        return self.padded_alike(range(self.num_rows))

    def collated(self, rows: Sequence[int]) -> Any:
        """Some rows as a batch of their own, as the loader makes it."""
        if not self.can_collate or self.redrawn:
            return self.trimmed(rows)
        return self._moved(self._collated(rows), rows)

    def reordered(self, order: Sequence[int]) -> Any:
        """The whole with its rows in another order; None if they have to stay."""
        if not self.can_collate or self.redrawn:
            return None
        return self._moved(self._collated(order), order)

    @functools.cached_property
    def parts_of_run(self) -> list[list[int]]:
        """The rows of each micro-batch of the run; empty where that is not known."""
        every, options = list(range(self.num_rows)), self._options
        size: int | None = self._size
        if options is not None:
            if not self._cuts_samples:
                if options.is_auto or not self.can_cut:
                    return []
                chosen = self._cutter.pair(self._whole, self._at(every))[1]
                return [each.rows for each in self._cutter.cut(chosen)]
            size = options.size
        size = size or self.num_rows
        return [every[at : at + size] for at in range(0, self.num_rows, size)]

    def padded_alike(self, rows: Sequence[int]) -> Any:
        """Some rows, padded as in the whole batch."""
        if len(rows) == self.num_rows and self._numbers is None:
            return self._moved(self._whole, rows)
        return self._moved(self._cutter.pair(self._whole, self._at(rows))[1], rows)

    def trimmed(self, rows: Sequence[int]) -> Any:
        """Some rows, without columns that are padding in all of them."""
        return self._moved(self._cutter.pair(self._whole, self._at(rows))[0], rows)

    def _collated(self, rows: Sequence[int]) -> Any:
        """A batch as it is before it is moved; this is what split windows cut."""
        assert self._collate is not None
        with self._in_width_of_run():
            batch = self._collate([self._samples[row] for row in rows])
            batch = self._trainer.precision_plugin.convert_input(batch)
            return before_batch_transfer(self._module, batch)

    @contextlib.contextmanager
    def _in_width_of_run(self) -> Iterator[None]:
        """Floats that batches are made of are as wide as in the run, in every batch."""
        present = torch.get_default_dtype()
        torch.set_default_dtype(self._default)
        try:
            yield
        finally:
            torch.set_default_dtype(present)

    def _at(self, rows: Sequence[int]) -> list[int]:
        if self._numbers is None:
            return list(rows)
        return [self._numbers[row] for row in rows]

    def _choose(self, most: int) -> None:
        if self.num_rows > most:
            measured = self._cutter.measure(self._whole)
            lengths = [measured.padded_of([row]) for row in range(self.num_rows)]
            self._numbers = _spread(lengths, most)
            self.num_rows = most

    def _moved(self, batch: Any, rows: Sequence[int]) -> Any:
        if not self.can_collate:  # the Trainer has moved the batch that was cut
            return batch
        # Hooks of the transfer may augment at random: rows get theirs in every part.
        self._draws.begin(rows)
        try:
            with self._in_width_of_run(), MeasuredCalls(dtype=None, draws=self._draws):
                return self._trainer.strategy.batch_to_device(batch, dataloader_idx=0)
        finally:
            self._draws.is_active = False
            self._draws.end()


def _samples(loader: Any, most: int) -> list[Any]:
    """Rows of unlike lengths among the first that a loader would read."""
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        return []
    rows = Rows(loader).first(max(LEAST, most))
    return [rows[i] for i in _spread([num_elements(row) for row in rows], most)]


def _spread(lengths: Sequence[int], most: int) -> list[int]:
    """The rows whose lengths differ most, in their order."""
    if len(lengths) <= most:
        return list(range(len(lengths)))
    ordered = sorted(range(len(lengths)), key=lambda i: lengths[i])
    step = (len(lengths) - 1) / max(most - 1, 1)
    return sorted(ordered[round(i * step)] for i in range(most))


def _fields(batch: Any) -> list[Any]:
    return take_apart(batch)[0]
