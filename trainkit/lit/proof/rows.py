"""A few rows of the training data: as one batch, and as the parts of a window."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from trainkit.core.nested import take_apart, tensors, with_tensors
from trainkit.core.split.cutting import Cutter, Limit
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.split.rows import Marks, Rows, marks_of
from trainkit.core.strategies import AccumulationStrategy, PerSample
from trainkit.data.rows import num_elements
from trainkit.lit.proof.copying import collates_by_itself, read_apart, samples_across
from trainkit.lit.proof.report import NotMeasured, in_one_line

Parts = list[list[int]]

POOL = 15
"""Rows are chosen among so many of the shortest."""

LABELS = ("label", "target", "tgt")
"""Within the name of a field that holds labels."""


class FewRows:
    """Makes batches of any of a few rows.

    They are put together anew of samples of the data set, as the loader would do it.
    Where there are no samples, rows are cut from a loader batch.

    Args:
        batch: a loader batch, on the host.
        options: how split windows cut; None for others.
        strategy: tells rows' lengths, and its labels.
        samples: rows as the data set has them.
        collate: makes a batch of samples; needed if there are some.
        pads: whether loader batches are each padded to a width of their own.
        is_stream: whether they are rows of a stream, of which only the first are known.

    Attributes:
        num_rows: how many there are.
        collates: whether batches are put together anew.
        collate_of_run: what the run puts its micro-batches together with.
        can_widen: whether rows can also be had as wide as all rows are together, where
            they would be narrower alone.
        varies: whether loader batches are each padded to a width of their own.
        is_stream: whether nobody can say how wide other batches will be.
        has_one_length: whether no row that was read is shorter than the others, though
            rows of other batches may be.
    """

    def __init__(
        self,
        batch: Any,
        options: MicroBatching | None,
        strategy: AccumulationStrategy | None,
        *,
        samples: Sequence[Any] = (),
        collate: Callable[[list[Any]], Any] | None = None,
        pads: bool = False,
        is_stream: bool = False,
    ) -> None:
        self.is_stream = is_stream
        self._options, self._samples, self._collate = options, samples, collate
        self._strategy = strategy or PerSample()
        self.collates = collate is not None and bool(samples)
        if self.collates and (self._looks_at_one() or self._divides_more(batch)):
            self.collates, samples = False, ()
        self._batch = self._collated(range(len(samples))) if self.collates else batch
        self.collate_of_run = None if options is None else options.collate
        yields_samples = self.collate_of_run is not None
        how = MicroBatching(size=1) if yields_samples or options is None else options
        self._cutter = Cutter(how, self._strategy)
        rows = Rows(-1)
        try:
            with _unheard():
                rows = self._cutter.read(self._batch).rows
        except Exception as error:
            if not self.collates:
                text = "the rows of the batch cannot be told apart"
                raise NotMeasured(f"{text}: {in_one_line(error)}") from error
        is_unlike = rows.num_rows not in (-1, len(samples))
        if is_unlike and options is not None and not yields_samples:
            self.collates = False  # the run cuts packs, or documents, not samples
        is_cut = not self.collates or rows.num_rows == len(samples)
        self._groups = rows.groups if is_cut else ()
        self.num_rows = rows.num_rows if is_cut else len(samples)
        if not self.collates:  # a batch of one fixed width has no row that fills it
            full = [max(g.lengths, default=0) == g.padded_length for g in self._groups]
            pads = pads and all(full)
        self.varies, self._narrows = pads, pads or not self.collates and bool(options)
        self.can_widen = self._narrows and is_cut
        if options is not None and yields_samples:  # what the run refuses to cut
            cutter, few = Cutter(options, self._strategy), [*samples]
            cutter.parts(few, cutter.read(few).rows, Limit(tokens=options.tokens))
        alike = all(len(set(g.lengths)) == 1 for g in self._groups)
        self.has_one_length = bool(is_stream and pads and self._groups and alike)

    def _looks_at_one(self) -> bool:
        """Whether collating leaves out all samples but one, which is a batch itself."""
        if len(self._samples) < 2:
            return False
        made = [list(tensors(self._collated(rows))) for rows in ([0], [0, 1])]
        return bool(made[0]) and all(map(torch.equal, *made))

    def _divides_more(self, batch: Any) -> bool:
        """Whether the run cuts fields of its loader batches that other batches keep
        whole, since they are as long as loader batches have rows by chance."""
        if self._options is None or self._options.collate is not None:
            return False
        number, cutter = len(self._samples), Cutter(self._options, self._strategy)
        with contextlib.suppress(Exception), _unheard():
            read = cutter.read(batch)
            num_rows = read.rows.num_rows
            if num_rows == 1 and self._options.pool is None:
                return False  # it is never cut
            other = self._collated(range(number - (num_rows == number)))
            return not {*read.divided} <= {*cutter.read(other).divided}
        return False

    @property
    def divided(self) -> list[str]:
        """The fields that are cut where rows are; none where rows are collated."""
        return [] if self.collates else self._cutter.read(self._batch).divided

    def with_whole(self, path: str) -> FewRows:
        """The rows, of which every batch has all of a field."""
        found, options = copy.copy(self), self._options or MicroBatching(size=1)
        options = replace(options, shared=(*options.shared, path))
        found._options, found._cutter = options, Cutter(options, self._strategy)
        return found

    def lengths(self) -> list[int]:
        """How long each row is; all alike where nothing tells."""
        if self.collates:
            return [num_elements(self._collated([n])) for n in range(self.num_rows)]
        return [sum(g.lengths[n] for g in self._groups) for n in range(self.num_rows)]

    @property
    def padded_sides(self) -> list[list[int]]:
        """For each side on which columns pad: the rows that have such columns."""
        sides: list[list[int]] = []
        for group in self._groups:
            spans, width = list(enumerate(group.spans)), group.padded_length
            sides.append([row for row, (start, _) in spans if start > 0])
            sides.append([row for row, (_, stop) in spans if stop < width])
        return [rows for rows in sides if rows]

    def make(self, rows: Sequence[int], *, alike: bool = False) -> Any:
        """A batch of some rows.

        Args:
            rows: their numbers.
            alike: as wide as all rows together, in place of what the run pads to.
        """
        if self.collates and not (alike and self.can_widen):
            return self._collated(rows)
        return self._cut(rows, wide=alike or not self._narrows)

    def loader_batch(self, rows: Sequence[int], *, alike: bool = False) -> Any:
        """What the run's loader would yield: samples, where the run collates them."""
        if self.collate_of_run is not None:
            return [self._samples[row] for row in rows]
        return self.make(rows, alike=alike)

    def cuts(self, choices: Sequence[Sequence[int]], size: int) -> list[Parts]:
        """The parts in which the run cuts each choice of rows, if a few fit in one."""
        cutter = Cutter(self._options or MicroBatching(size=1), self._strategy)
        with _unheard():
            batch = self.loader_batch(range(self.num_rows), alike=not self.collates)
            measured = cutter.read(batch).rows
        found = []
        for rows in choices:
            parts = cutter.parts(batch, measured.of(rows), Limit(size))
            found.append([sorted(rows[place] for place in part) for part in parts])
        return found

    def _cut(self, rows: Sequence[int], *, wide: bool) -> Any:
        """Rows of the batch, with the columns that are padding in all of them or
        without."""
        with _unheard():
            layout = self._cutter.read(self._batch)
            return (layout.untrimmed() if wide else layout).of(list(rows))

    def _collated(self, rows: Sequence[int]) -> Any:
        assert self._collate is not None
        return self._collate([self._samples[row] for row in rows])

    # ---- which rows ------------------------------------------------------------------

    def shortest(
        self, most: int = POOL, among: Sequence[int] | None = None
    ) -> list[int]:
        """Some of the shortest rows, which cost least."""
        lengths = self.lengths()
        among = range(self.num_rows) if among is None else among
        return sorted(sorted(among, key=lengths.__getitem__)[:most])

    def counts(
        self, rows: Sequence[int], weighs: Sequence[Callable[..., Any]]
    ) -> Tensor:
        """What each row counts by each of several denominators."""
        singles = [with_tensors(self.make([row]), Tensor.cpu) for row in rows]
        columns = [[_number(weigh, each) for each in singles] for weigh in weighs]
        return torch.tensor(columns, dtype=torch.float64).T

    def whole_numbers(self) -> list[str]:
        """The paths of single numbers, which may count the loader batch."""
        found = []
        for path, value in take_apart(self._batch)[0]:
            is_single = isinstance(value, Tensor) and value.ndim == 0
            number: Any = value.item() if is_single else value
            if type(number) in (int, float) and path and number > 1:
                found.append(path)
        return found

    # ---- what all count alike --------------------------------------------------------

    @property
    def labels_alone(self) -> Marks | None:
        """The strategy's labels or weights, where nobody names what tells lengths."""
        if self.collates or getattr(self._options, "lengths", None) is not None:
            return None
        marks = marks_of(self._batch, (), self._strategy)
        are_alone = len(marks) == 1 and marks[0].are_labels and marks[0].width > 0
        return marks[0] if are_alone else None

    @property
    def ignored(self) -> int:
        """The label that does not count."""
        return getattr(self._strategy, "ignore_index", -100)

    @property
    def may_count_unlike(self) -> bool:
        """Whether a mask or labels may count otherwise in other rows than in these."""
        found = self._countable().values()
        of_rows = [v for v, _ in found if v.ndim == 1 and bool((v == v[0]).all())]
        return bool(of_rows) or any(value.ndim > 1 for value, _ in found)

    def ending(self, few: Sequence[int]) -> FewRows | None:
        """The rows, of which some end where half of the labels are over in one; None if
        nothing says where a row ends, or nothing would be left in one that counts.

        From there on labels are ignored, and masks are 0. All other fields continue.
        """
        found = self._countable().items()
        fields = {path: each for path, each in found if each[0].ndim > 1}
        if not fields or self.collate_of_run is not None:
            return None
        at = list(few)
        ends = [
            _firsts_and_halves(value[at] != none) for value, none in fields.values()
        ]
        # In each row something still counts, and of causal models a second label.
        stop = max(2, min(int(half.min()) for _, half in ends))
        stop = max(stop, *(int(first.max()) for first, _ in ends))
        stop = min(stop, *(value.shape[1] - 1 for value, _ in fields.values()))
        parts, build = take_apart(self._batch)
        values = []
        for path, value in parts:  # of which two may be one tensor
            if path in fields:
                value = value.clone()
                value[at, stop:] = fields[path][1]
            values.append(value)
        batch = build(iter(values))
        pads = self.has_one_length
        rows = FewRows(batch, self._options, self._strategy, pads=pads)
        counts = rows.counts(few, [self._strategy.weight])
        return rows if bool((counts > 0).all()) else None

    def _countable(self) -> dict[str, tuple[Tensor, int]]:
        """Masks and labels of all rows, and what does not count in each."""
        fields = [
            (path, value)
            for path, value in take_apart(self._batch)[0]
            if isinstance(value, Tensor) and value.ndim and len(value) == self.num_rows
        ]
        own = [getattr(self._strategy, name, None) for name in ("labels", "mask")]
        named = {*map(str, [*own, *getattr(self._options, "length_paths", ())])}
        last = fields[-1][0] if len(fields) > 1 or "1" in dict(fields) else None
        found = {}
        for path, value in fields:
            name = path.rpartition(".")[2].lower()
            is_number = value.is_floating_point() or value.is_complex()
            is_label = name == "y" or any(each in name for each in LABELS)
            is_label |= path in named or path == last and path.isdigit()
            is_mask = path == str(own[1]) or path != str(own[0]) and _is_mask(value)
            is_wide = value.ndim > 1 and value.shape[1] > 1
            if is_mask and is_wide and (is_label or "mask" in name):
                found[path] = value, 0
            elif is_label and not (is_number or value.dtype is torch.bool):
                if is_wide or value.ndim == 1:
                    found[path] = value, self.ignored
        return found


def few_rows(
    loader: Any,
    batch: Any,
    options: MicroBatching | None,
    strategy: AccumulationStrategy | None,
    number: int,
) -> FewRows:
    """Rows from all over a loader's data set; where that cannot be, those of a batch.

    Args:
        loader: that of the run.
        batch: its first one.
        options: how split windows cut; None for others.
        strategy: what a micro-batch weighs.
        number: how many rows to read.
    """
    own = None if options is None else options.collate
    collate = own or read_apart(getattr(loader, "collate_fn", None))
    samples = samples_across(loader, number, collate)
    if own is not None:
        samples = samples or list(batch)
    stacks = isinstance(loader, DataLoader) and loader.batch_sampler is not None
    return FewRows(
        batch,
        options,
        strategy,
        samples=samples,
        collate=collate if samples else None,
        pads=collates_by_itself(loader) or not stacks,
        is_stream=isinstance(getattr(loader, "dataset", None), IterableDataset),
    )


def _firsts_and_halves(counts: Tensor) -> tuple[Tensor, Tensor]:
    """In each row: the column behind the first that counts, and behind half of them."""
    done = counts.flatten(2).any(2) if counts.ndim > 2 else counts
    done = done.long().cumsum(1)
    return (done < 1).sum(1) + 1, (2 * done < done[:, -1:]).sum(1) + 1


def _number(weigh: Callable[[Any], Any], batch: Any) -> float:
    """What a batch weighs; 0 if that cannot be said."""
    try:
        found = float(weigh(batch))
    except Exception:
        return 0.0
    return found if abs(found) < float("inf") else 0.0


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """The cutter warns when the run cuts the batch, not here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _is_mask(value: Tensor) -> bool:
    return value.dtype is torch.bool or bool(((value == 0) | (value == 1)).all())
