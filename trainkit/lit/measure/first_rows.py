"""A few rows of the first batch: as one batch, and in two parts."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainkit.core.proof.candidates import candidates
from trainkit.core.proof.parts import telling_rows
from trainkit.core.split.cutting import Cutter
from trainkit.core.split.fields import with_tensors
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.split.whole_counts import whole_counts
from trainkit.core.strategies import AccumulationStrategy, Uniform
from trainkit.lit.measure.clean import NotMeasured

POOL = 15
"""The rows are chosen among so many of the shortest."""

SIZES = {5: [(2, 3)], 4: [(1, 3), (2, 2)], 3: [(1, 2)], 2: [(1, 1)]}
"""The rows of the two parts, for each number of rows; what comes first is tried first.
Parts of unlike size tell a mean of means from a mean."""

ALIKE = {4: [(2, 2)], 2: [(1, 1)]}
"""For a strategy that counts micro-batches alike, and so needs them of one size."""


@dataclass(frozen=True)
class InParts:
    """A few rows, as one batch and in two parts.

    Attributes:
        whole: the batch of all of them.
        parts: the batches of the two parts.
        rows: the rows of each part, by their place in the whole.
        loader_batch: what they were cut from, where the run itself cuts nothing.
        are_padded: whether rows of the parts are padded as in the whole, and in the
            run by the loader batch that they are in.
    """

    whole: Any
    parts: list[Any]
    rows: list[list[int]]
    loader_batch: Any = None
    are_padded: bool = False

    def others(self, rows: Sequence[int]) -> tuple[Any, Sequence[int]]:
        """The part that has none of some rows, and its rows."""
        pairs = zip(self.parts, self.rows, strict=True)
        return next(pair for pair in pairs if set(pair[1]).isdisjoint(rows))


class FirstRows:
    """Chooses rows of a batch, and makes two parts of them, padded alike.

    Args:
        batch: a loader batch.
        options: how split windows cut; None for streamed ones.
        strategy: weighs rows, and tells their lengths.

    Attributes:
        num_rows: how many rows the batch has.
        sizes: of the parts, for each number of rows.
    """

    def __init__(
        self,
        batch: Any,
        options: MicroBatching | None,
        strategy: AccumulationStrategy,
    ) -> None:
        self._batch, self._options, self._strategy = batch, options, strategy
        self._collate = None if options is None else options.collate
        self._cutter = Cutter(options or MicroBatching(size=1), strategy)
        self._rows = self._cutter.measure(batch)
        self.num_rows = self._rows.num_rows
        self.sizes = ALIKE if isinstance(strategy, Uniform) else SIZES

    def in_parts(self, sizes: Sequence[int], *, trims: bool = True) -> InParts:
        """Some of the shortest rows that count, in parts that tell denominators apart.

        Args:
            sizes: the rows of each part.
            trims: whether columns that are padding in all of these rows may go.
        """
        pool = self._shortest()
        counts = self._counts(pool)
        counting = [n for n in range(len(pool)) if float(counts[n, 0]) > 0]
        if len(counting) < sum(sizes):
            counting = list(range(len(pool)))
        own = None if isinstance(self._strategy, Uniform) else 0
        chosen = telling_rows(counts[counting], sizes, own)
        rows = [[pool[counting[n]] for n in part] for part in chosen]
        return self._cut(sorted(sum(rows, [])), rows, trims)

    def take(self, rows: list[int]) -> Any:
        """Some rows of the batch, in this order, with all columns."""
        return self._cutter.pair(self._batch, rows)[1]

    def _cut(self, all_rows: list[int], rows: list[list[int]], trims: bool) -> InParts:
        within = [[all_rows.index(row) for row in part] for part in rows]
        if self._collate is not None:
            parts = [self._collated(part) for part in rows]
            return InParts(self._collated(all_rows), parts, within)
        whole = self._cutter.pair(self._batch, all_rows)[0 if trims else 1]
        parts = [self._cutter.pair(whole, part)[1] for part in within]
        if self._options is not None:
            return InParts(whole, parts, within)
        lengths = [{each.lengths[n] for n in all_rows} for each in self._rows.groups]
        are_padded = any(len(unlike) > 1 for unlike in lengths)
        return InParts(whole, parts, within, self._batch, are_padded)

    def _collated(self, rows: Sequence[int]) -> Any:
        assert self._collate is not None
        return self._collate([self._batch[row] for row in rows])

    def _shortest(self) -> list[int]:
        groups = self._rows.groups
        by_length = sorted(
            range(self.num_rows), key=lambda row: sum(g.lengths[row] for g in groups)
        )
        return sorted(by_length[:POOL])

    def _counts(self, pool: Sequence[int]) -> Tensor:
        """What each row counts by each denominator, the strategy's own first."""
        if self._collate is not None:
            singles = [self._collated([row]) for row in pool]
            whole = singles[0]
        else:
            whole = self._cutter.pair(self._batch, list(pool))[0]
            whole = with_tensors(whole, lambda tensor: tensor.detach().cpu())
            singles = [self._cutter.pair(whole, [n])[1] for n in range(len(pool))]
        columns = [[_weight(self._strategy.weight, each) for each in singles]]
        for candidate in candidates(whole, {}):
            columns.append([_weight(candidate.weigh, each) for each in singles])
        return torch.tensor(columns, dtype=torch.float64).T


def _weight(weigh: Any, batch: Any) -> float:
    with contextlib.suppress(Exception):
        found = float(weigh(batch))
        return found if math.isfinite(found) else 0.0
    return 0.0


def refuse_kept_counts(
    cut: InParts, strategies: Iterable[AccumulationStrategy]
) -> None:
    """Refuse a count that is right for each loader batch of the run, and that rows cut
    from one keep."""
    if cut.loader_batch is None:
        return
    whole, part = (
        with_tensors(batch, lambda tensor: tensor.detach().cpu())
        for batch in (cut.loader_batch, cut.parts[0])
    )
    counts = set()
    for strategy in strategies:
        with contextlib.suppress(Exception):
            counts.add(int(strategy.weight(whole)))
    for path, number, _ in whole_counts(whole, part, counts):
        raise NotMeasured(
            f"field {path!r} is {number:g} and counts the loader batch, also for rows "
            f"that are cut from it; trainkit.check batches rows anew"
        )
