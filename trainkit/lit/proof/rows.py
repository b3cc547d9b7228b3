"""A few rows of the training data, chosen in parts, and batches of any of them."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from trainkit.core.nested import take_apart, tensors, with_tensors
from trainkit.core.split.cutting import Cutter, Limit
from trainkit.core.split.layout import Layout
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.strategies import AccumulationStrategy, PerSample, Uniform
from trainkit.data.rows import num_elements
from trainkit.lit.proof.copying import collates_by_itself, read_apart, samples_across
from trainkit.lit.proof.denominators import MEANT, candidates
from trainkit.lit.proof.report import NotMeasured, in_one_line

Parts = list[list[int]]

POOL = 15
"""Rows are chosen among so many of the shortest."""

TRIES = 100
CLEAR = 0.02
"""Shares that differ by less are hardly told apart."""


@dataclass(frozen=True, eq=False)
class FewRows:
    """Batches of any of a few rows.

    They are put together anew of samples of the data set, as the loader would do it.
    Where there are no samples, rows are cut from a loader batch.

    Attributes:
        batch: all rows, on the host.
        layout: of this batch; None where its rows cannot be told apart.
        options: how split windows cut; None for others.
        strategy: tells rows' lengths, and its labels.
        samples: rows as the data set has them.
        collate: makes a batch of samples; None where rows are cut.
        pads: whether loader batches are each padded to a width of their own.
        trims: whether else rows that are cut leave out the columns that pad in all.
        is_stream: whether nobody can say how wide other batches will be.
        is_wide: whether each batch is as wide as all rows are together.
    """

    batch: Any
    layout: Layout | None
    options: MicroBatching | None
    strategy: AccumulationStrategy
    samples: Sequence[Any] = ()
    collate: Callable[[list[Any]], Any] | None = None
    pads: bool = False
    trims: bool = False
    is_stream: bool = False
    is_wide: bool = False

    @classmethod
    def cut_from(
        cls,
        batch: Any,
        options: MicroBatching | None,
        strategy: AccumulationStrategy | None,
        *,
        pads: bool = False,
        **how: Any,
    ) -> FewRows:
        """Rows that are cut from one batch."""
        strategy = strategy or PerSample()
        try:
            cutter = Cutter(options or MicroBatching(size=1), strategy)
            layout = cutter.read(batch)
        except Exception as error:
            text = "the rows of the batch cannot be told apart"
            raise NotMeasured(f"{text}: {in_one_line(error)}") from error
        for width, spans in layout.rows.spans.items():  # fixed, if no row fills it
            pads = pads and max((b - a for a, b in spans), default=0) == width
        return cls(batch, layout, options, strategy, pads=pads, **how)

    @property
    def num_rows(self) -> int:
        return len(self.samples) if self.layout is None else self.layout.rows.num_rows

    @property
    def wide(self) -> FewRows:
        """These rows, each as wide as all together; themselves, if that is nothing
        new."""
        can_widen = self.layout is not None and (self.pads or self.trims)
        return replace(self, is_wide=True) if can_widen and not self.is_wide else self

    @property
    def has_one_length(self) -> bool:
        """Whether no row that was read is shorter than the others, though rows of other
        batches may be."""
        spans = [*self.layout.rows.spans.values()] if self.layout is not None else []
        are_alike = bool(spans) and all(len({b - a for a, b in s}) == 1 for s in spans)
        return self.is_stream and self.pads and not self.is_wide and are_alike

    @property
    def ignored(self) -> int:
        """The label that does not count."""
        return getattr(self.strategy, "ignore_index", -100)

    def again(self, batch: Any) -> FewRows:
        """The rows of another batch that has as many; they are cut from it."""
        how = {"pads": self.has_one_length, "trims": self.trims}
        how["is_wide"] = self.is_wide
        return FewRows.cut_from(batch, self.options, self.strategy, **how)

    @property
    def divided(self) -> list[str]:
        """The paths of the fields that split windows cut."""
        is_cut = self.options is not None and self.collate is None
        return self.layout.divided if is_cut and self.layout is not None else []

    def with_whole(self, path: str) -> FewRows:
        """These rows, of which every batch has all of a field."""
        assert self.options is not None
        options = replace(self.options, shared=(*self.options.shared, path))
        layout = Cutter(options, self.strategy).read(self.batch)
        return replace(self, options=options, layout=layout)

    # ---- batches ---------------------------------------------------------------------

    def make(self, rows: Sequence[int]) -> Any:
        """A batch of some rows."""
        if self.collate is not None and not self.is_wide:
            return self.collate([self.samples[row] for row in rows])
        assert self.layout is not None
        narrows = (self.pads or self.trims) and not self.is_wide
        return (self.layout if narrows else self.layout.untrimmed()).of(list(rows))

    @property
    def collate_of_run(self) -> Callable[[list[Any]], Any] | None:
        """What the run puts its micro-batches together with, if it cuts samples."""
        return None if self.options is None else self.options.collate

    def loader_batch(self, rows: Sequence[int]) -> Any:
        """What the run's loader would yield: samples, where the run collates them."""
        if self.collate_of_run is not None:
            return [self.samples[row] for row in rows]
        return self.make(rows)

    def cuts(self, choices: Sequence[Sequence[int]], size: int) -> list[Parts]:
        """The parts in which the run cuts each choice of rows, if a few fit in one."""
        options = self.options or MicroBatching(size=1)
        cutter, batch = Cutter(options, self.strategy), self.batch
        if options.collate is not None:
            batch = [*self.samples]
        read = cutter.read(batch).rows
        cutter.parts(batch, read, Limit(tokens=options.tokens))  # it may refuse
        found = []
        for rows in choices:
            parts = cutter.parts(batch, read.of(rows), Limit(size))
            found.append([sorted(rows[place] for place in part) for part in parts])
        return found

    # ---- what they hold --------------------------------------------------------------

    @cached_property
    def lengths(self) -> list[int]:
        """How much each row holds, without what pads it beside others."""
        if self.collate is None and self.layout is not None:
            spans = [*self.layout.rows.spans.values()]
            return [
                sum(each[row][1] - each[row][0] for each in spans)
                for row in range(self.num_rows)
            ]
        return [num_elements(self.make([row])) for row in range(self.num_rows)]

    def shortest(
        self, most: int = POOL, among: Sequence[int] | None = None
    ) -> list[int]:
        """Some of the shortest rows, which cost least."""
        lengths = self.lengths
        among = range(self.num_rows) if among is None else among
        return sorted(sorted(among, key=lengths.__getitem__)[:most])

    def counts(
        self, rows: Sequence[int], weighs: Sequence[Callable[..., Any]]
    ) -> Tensor:
        """What each row counts by each of several denominators, without what pads it
        beside others; 0 where that cannot be said."""
        alone = replace(self, is_wide=False)
        singles = [with_tensors(alone.make([row]), Tensor.cpu) for row in rows]
        found = torch.zeros(len(singles), len(weighs), dtype=torch.float64)
        for row, column in itertools.product(*map(range, found.shape)):
            with contextlib.suppress(Exception):
                found[row, column] = float(weighs[column](singles[row]))
        return found.where(found.isfinite(), 0)

    def whole_numbers(self) -> list[str]:
        """The paths of single numbers, which may count the loader batch."""
        found = []
        for path, value in take_apart(self.batch)[0]:
            is_single = isinstance(value, Tensor) and value.ndim == 0
            number: Any = value.item() if is_single else value
            if type(number) in (int, float) and path and number > 1:
                found.append(path)
        return found


def few_rows(
    loader: Any,
    batch: Any,
    options: MicroBatching | None,
    strategy: AccumulationStrategy | None,
    number: int,
    *,
    trims: bool = False,
) -> FewRows:
    """Rows from all over a loader's data set; where that cannot be, those of a batch.

    Args:
        loader: that of the run.
        batch: its first one.
        options: how split windows cut; None for others.
        strategy: what a micro-batch weighs.
        number: how many rows to read.
        trims: whether split windows leave out columns that only pad.
    """
    own = None if options is None else options.collate
    collate = own or read_apart(getattr(loader, "collate_fn", None))
    samples = samples_across(loader, number, collate)
    if own is not None:
        samples = samples or list(batch)
    stacks = isinstance(loader, DataLoader) and loader.batch_sampler is not None
    pads = collates_by_itself(loader) or not stacks
    is_stream = isinstance(getattr(loader, "dataset", None), IterableDataset)
    if not samples or _looks_at_one(collate, samples):
        how = {"pads": pads, "trims": trims, "is_stream": is_stream}
        return FewRows.cut_from(batch, options, strategy, **how)
    cuts = options if own is None else None
    if cuts is not None and _divides_more(cuts, strategy, batch, collate, samples):
        return FewRows.cut_from(batch, options, strategy, pads=pads, trims=trims)
    whole, layout = collate(samples), None
    try:
        layout = FewRows.cut_from(whole, cuts, strategy).layout
    except NotMeasured:
        if cuts is not None:
            raise
    if layout is not None and layout.rows.num_rows != len(samples):
        if cuts is not None:  # the run cuts packs, or documents, not samples
            return FewRows.cut_from(whole, options, strategy, pads=pads, trims=trims)
        layout = None
    strategy = strategy or PerSample()
    return FewRows(whole, layout, options, strategy, samples, collate, pads)


def _looks_at_one(collate: Callable[[list[Any]], Any], samples: Sequence[Any]) -> bool:
    """Whether collating leaves out all samples but one, which is a batch itself."""
    if len(samples) < 2:
        return False
    made = [list(tensors(collate(list(samples[:number])))) for number in (1, 2)]
    return bool(made[0]) and all(map(torch.equal, *made))


def _divides_more(
    options: MicroBatching, strategy: Any, batch: Any, collate: Any, samples: list[Any]
) -> bool:
    """Whether the run cuts fields of its loader batches that other batches keep whole,
    since they are as long as loader batches have rows by chance."""
    cutter = Cutter(options, strategy or PerSample())
    with contextlib.suppress(Exception):
        read = cutter.read(batch)
        if (number := read.rows.num_rows) == 1 and options.pool is None:
            return False  # it is never cut
        other = collate(samples[: len(samples) - (number == len(samples))])
        return not {*read.divided} <= {*cutter.read(other).divided}
    return False


# ---- in parts ------------------------------------------------------------------------


def chosen_parts(
    rows: FewRows, sizes: Sequence[int], own: AccumulationStrategy
) -> Parts:
    """Some rows in parts, so that what may be counted differs between them, and widths;
    the parts that the run makes, where it cuts the rows that are chosen.

    Of random choices, the one is taken in which each part counts something, with most
    widths, and in which most denominators, first of all those that are often meant, are
    apart from the run's own.

    Args:
        rows: of which some are chosen.
        sizes: how many rows each part gets.
        own: what the run counts.
    """
    pool, lengths = rows.shortest(max(sum(sizes), POOL)), rows.lengths
    batch, draw = rows.make(pool), random.Random(0)
    labels = [  # fields with one label a row
        dict(zip(pool, each.tolist(), strict=True))
        for each in tensors(batch)
        if each.shape == (len(pool),) and not each.is_floating_point()
    ]
    named = candidates(batch, {})
    meant = sum(each.simplicity <= MEANT for each in named)
    counts = torch.zeros(rows.num_rows, 1 + len(named), dtype=torch.float64)
    counts[pool] = rows.counts(pool, [own.weight, *(each.weigh for each in named)])
    tries = TRIES if rows.options is None else TRIES // 4
    drawn = [draw.sample(pool, sum(sizes)) for _ in range(tries)]
    if rows.options is not None:
        choices = rows.cuts([sorted(each) for each in drawn], max(sizes))
    else:
        bounds = [*itertools.pairwise([0, *itertools.accumulate(sizes)])]
        choices = [[sorted(each[a:b]) for a, b in bounds] for each in drawn]

    def merit(parts: Parts) -> tuple[float, ...]:
        widths = {max(lengths[row] for row in part) for part in parts}
        chosen = [row for part in parts for row in part]
        # Where all labels are unlike, or each occurs twice, classes count as rows do.
        times = [Counter(each[row] for row in chosen).values() for each in labels]
        has_kinds = any(len({*each}) > 1 for each in times)
        shares = shares_of(counts, parts, own)
        apart = (shares[:, 1:] - shares[:, :1]).norm(dim=0)
        first = float(apart[:meant].clamp(max=CLEAR).sum())
        number, is_counted = int((apart > CLEAR).sum()), bool((shares[:, 0] > 0).all())
        return is_counted, len(widths), has_kinds, first, number

    return max(choices, key=merit)


def shares_of(counts: Tensor, parts: Parts, own: AccumulationStrategy) -> Tensor:
    """What each part weighs, of all of them: parts x denominators.

    Args:
        counts: what each row counts, rows x denominators, the run's own first. What
            counts no row says nothing, and all parts weigh alike by it.
        parts: rows in parts.
        own: the run's own strategy.
    """
    in_parts = torch.stack([counts[part].sum(0) for part in parts])
    in_parts[:, in_parts.sum(0) == 0] = 1
    if isinstance(own, Uniform):
        in_parts[:, 0] = 1
    return in_parts / in_parts.sum(0)


def has_equal_batches(loader: Any) -> bool:
    """Whether all batches of a loader surely have as many rows."""
    size = getattr(loader, "batch_size", None)
    sampler: Any = getattr(loader, "sampler", None)
    if not isinstance(size, int):
        return False
    if getattr(loader, "drop_last", False):
        return True
    return hasattr(sampler, "__len__") and len(sampler) % size == 0


def unlike_sizes(rows: int, most: int, *, is_equal: bool) -> list[int]:
    """How many of some rows each of several parts gets.

    >>> unlike_sizes(24, 6, is_equal=False)
    [2, 2, 3, 5, 6, 6]

    Args:
        rows: how many there are.
        most: how many parts, if there are two rows for each, and one more.
        is_equal: whether all parts have as many rows.
    """
    number = max(2, min(most, (rows if is_equal else rows - 1) // 2))
    sizes = [rows // number] * number
    if is_equal:
        return sizes
    for place in range(rows % number):
        sizes[-1 - place] += 1
    for place in range(number // 2):  # the first are shorter, the last longer
        moves = min(sizes[place] - (1 if rows < 5 else 2), number // 2 - place)
        sizes[place] -= max(moves, 0)
        sizes[-1 - place] += max(moves, 0)
    return sizes
