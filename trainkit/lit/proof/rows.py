"""A few rows of the training data: as one batch, and as the parts of a window."""

from __future__ import annotations

import contextlib
import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from trainkit.core.generators import random_kept
from trainkit.core.split.cutting import Cutter, Limit
from trainkit.core.split.fields import take_apart, with_tensors
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.strategies import AccumulationStrategy, PerSample
from trainkit.lit.probe.rows import Rows, num_elements, rows_at
from trainkit.lit.proof.copying import read_apart
from trainkit.lit.proof.verdict import NotMeasured, in_one_line

Parts = list[list[int]]

POOL = 15
"""Rows are chosen among so many of the shortest."""

TRIES = 200

CLEAR = 0.02
"""Shares that differ by less are hardly told apart."""

LABELS = ("label", "target", "tgt", "y")
"""Within the name of a field that holds labels, or its whole name."""


class FewRows:
    """Makes batches of any of a few rows.

    Args:
        batch: a loader batch, on the host.
        options: how split windows cut; None for others.
        strategy: tells rows' lengths, and its labels.
        samples: rows as the data set has them, if batches are to be made anew of them.
        collate: makes a batch of samples.

    Attributes:
        num_rows: how many there are.
        collates: whether batches are made anew by the collate function.
        can_cut: whether rows can be cut from a batch, so that they keep its width.
        has_classes: whether rows have one label each, some of which were exchanged.
    """

    def __init__(
        self,
        batch: Any,
        options: MicroBatching | None,
        strategy: AccumulationStrategy | None,
        *,
        samples: Sequence[Any] = (),
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self._options, self._samples, self._collate = options, samples, collate
        self._strategy = strategy or PerSample()
        if options is not None and options.collate is not None:
            self._samples, self._collate = samples or list(batch), options.collate
        self.collates = bool(self._samples)
        self._batch = self._collated(range(len(self._samples))) if self.collates else (
            batch
        )  # fmt: skip
        own = options if options is not None and options.collate is None else None
        self._cutter = Cutter(own or MicroBatching(size=1), self._strategy)
        self.num_rows, self._groups = len(self._samples), ()
        try:
            with _unheard():
                measured = self._cutter.measure(self._batch)
            self.num_rows, self._groups = measured.num_rows, measured.groups
            self.can_cut = self.num_rows == len(self._samples) or not self.collates
        except Exception as error:
            self.can_cut = False
            if not self.collates:
                text = "the rows of the batch cannot be told apart"
                raise NotMeasured(f"{text}: {in_one_line(error)}") from error
        if not self.can_cut:
            self.num_rows, self._groups = len(self._samples), ()
        self._is_split = options is not None
        self._width = None if self.collates else Width.of(self._batch, self._strategy)
        # Where no row fills the width, the run pads all rows to one.
        is_full = self._width is not None and self._width.is_full
        self.pads_each = self.collates or self._is_split or is_full
        self.is_guess = self._width is not None and self._width.is_guess
        self.has_classes = False

    @property
    def has_padding(self) -> bool:
        """Whether some rows could go without some of their columns."""
        return any(group.has_padding for group in self._groups) and not self.collates

    @property
    def have_one_length(self) -> bool:
        """Whether rows are sequences of numbers, and no row of the batch is padded."""
        is_one = not self.collates and len(set(self.lengths())) == 1
        return is_one and bool(_sequences(self._batch))

    def lengths(self) -> list[int]:
        """How long each row is; all alike where nothing tells."""
        if self._width is not None:
            return [stop - start for start, stop in self._width.spans]
        if not self._groups:
            return [0] * self.num_rows
        return [sum(g.lengths[n] for g in self._groups) for n in range(self.num_rows)]

    def make(self, rows: Sequence[int], *, alike: bool = False) -> Any:
        """A batch of some rows.

        Args:
            rows: their numbers.
            alike: keep the width of all rows, in place of what the run pads to.
        """
        if self.collates and not alike:
            return self._collated(rows)
        with _unheard():
            trimmed, wide = self._cutter.pair(self._batch, list(rows))
        if alike or not self.pads_each:
            return wide
        if self._is_split or self._width is None:
            return trimmed
        return self._width.narrowed(wide, rows)

    def loader_batch(self, rows: Sequence[int]) -> Any:
        """What the run's loader would yield: samples, where the run collates them."""
        if self._options is not None and self._options.collate is not None:
            return [self._samples[row] for row in rows]
        return self.make(rows, alike=not self.collates)

    def cut(self, rows: Sequence[int], size: int) -> Parts:
        """The parts in which the run cuts these rows, if only a few fit in one."""
        with _unheard():
            found = self._cutter.cut(self.loader_batch(rows), Limit(size, None))
        return [sorted(rows[place] for place in each.rows) for each in found]

    def _collated(self, rows: Sequence[int]) -> Any:
        assert self._collate is not None
        return self._collate([self._samples[row] for row in rows])

    # ---- which rows ------------------------------------------------------------------

    def shortest(self, most: int = POOL) -> list[int]:
        """Some of the shortest rows, which cost least."""
        lengths = self.lengths()
        return sorted(sorted(range(self.num_rows), key=lengths.__getitem__)[:most])

    def counts(
        self, rows: Sequence[int], weighs: Sequence[Callable[..., Any]]
    ) -> Tensor:
        """What each row counts by each of several denominators."""
        singles = [_on_host(self.make([row])) for row in rows]
        columns = [[number_of(weigh, each) for each in singles] for weigh in weighs]
        return torch.tensor(columns, dtype=torch.float64).T

    def whole_numbers(self, *, within: bool = False) -> list[str]:
        """The paths of single numbers, which may count the loader batch.

        Args:
            within: also where batches are made anew, for those that are cut then.
        """
        found, is_new = [], self.collates and not within
        for path, value in () if is_new else take_apart(self._batch)[0]:
            is_single = isinstance(value, Tensor) and value.ndim == 0
            number: Any = value.item() if is_single else value
            if type(number) in (int, float) and path and number > 1:
                found.append(path)
        return found

    # ---- what all count alike --------------------------------------------------------

    def with_fewer_labels(self, rows: Sequence[int]) -> FewRows | None:
        """Rows of which some count less than others; None if the batch has
        nothing that can count less.

        Half of their labels are ignored, and their masks end there. Where a row has one
        label, which is alike in all rows, they get another one.
        """
        fields = self._countable()
        if not fields or self.collates:
            return None
        ignored = getattr(self._strategy, "ignore_index", -100)
        ids, at = {id(value) for _, value in fields}, list(rows)
        behind = [_half(v[at] != ignored) for _, v in fields if v.ndim > 1]
        stop = max(behind, default=0)

        def changed(value: Tensor) -> Tensor:
            if id(value) not in ids:
                return value
            value = value.clone()
            if value.ndim == 1:
                value[at] += 1 if value[0] == 0 else -1
            else:
                value[at, stop:] = 0 if _is_mask(value) else ignored
            return value

        batch = with_tensors(self._batch, changed)
        found = FewRows(batch, self._options, self._strategy)
        found.has_classes = all(value.ndim == 1 for _, value in fields)
        return found

    def _countable(self) -> list[tuple[str, Tensor]]:
        """Masks and labels, of which all rows have equally many."""
        fields = [
            (path, value)
            for path, value in take_apart(self._batch)[0]
            if isinstance(value, Tensor) and value.ndim and len(value) == self.num_rows
        ]
        named = str(getattr(self._strategy, "labels", None))
        last = fields[-1][0] if len(fields) > 1 else None
        found = []
        for path, value in fields:
            name = path.rpartition(".")[2].lower()
            is_named = path == named or path == last and path.isdigit()
            is_label = is_named or any(n in name for n in LABELS[:3]) or name == "y"
            whole = not (value.is_floating_point() or value.is_complex())
            if value.ndim > 1 and value.shape[1] > 1 and whole:
                if is_label or "mask" in name and _is_mask(value):
                    found.append((path, value))
            elif value.ndim == 1 and whole and is_label and value.dtype != torch.bool:
                if bool((value == value[0]).all()):
                    found.append((path, value))
        return found


class Width:
    """Which columns of each row are no padding, in a batch that is padded.

    A mask tells it, or labels that do not count where all other whole numbers of a row
    are one number. Where neither is there, rows that end in one number while others do
    not are guessed to be padded.

    Args:
        real: for each row and column, whether it is no padding.
        is_guess: whether nothing but the numbers themselves tells it.

    Attributes:
        spans: for each row its first column, and the column behind its last one.
    """

    def __init__(self, real: Tensor, *, is_guess: bool = False) -> None:
        self.is_guess, self._num_columns = is_guess, real.shape[1]
        self.spans: list[tuple[int, int]] = []
        for row in real:
            at = row.nonzero()
            is_empty = not len(at)
            self.spans.append((0, 0) if is_empty else (int(at[0]), int(at[-1]) + 1))

    @property
    def is_full(self) -> bool:
        """Whether some row has no padding, and another one has."""
        full = [span == (0, self._num_columns) for span in self.spans]
        return any(full) and not all(full)

    def narrowed(self, batch: Any, rows: Sequence[int]) -> Any:
        """A batch of some rows without the columns that are padding in all of them."""
        spans = [self.spans[row] for row in rows]
        start, stop = min(s for s, _ in spans), max(s for _, s in spans)

        def cut(value: Tensor) -> Tensor:
            is_wide = value.ndim > 1 and value.shape[1] == self._num_columns
            if not is_wide:
                return value
            return value[:, start : max(stop, start + 1)].contiguous()

        return with_tensors(batch, cut)

    @classmethod
    def of(cls, batch: Any, strategy: AccumulationStrategy) -> Width | None:
        """The width of a batch; None if nothing tells it."""
        fields = _sequences(batch)
        for name, mask in fields.items():
            if "mask" in name and _is_mask(mask):
                return cls(mask != 0)
        ignored = getattr(strategy, "ignore_index", -100)
        for labels in fields.values():
            real = labels != ignored
            others = [each for each in fields.values() if each.shape == labels.shape]
            if not real.all() and all(_is_constant(each[~real]) for each in others):
                return cls(real)
        for each in fields.values():
            last = each[:, -1]
            padding = last.mode().values
            if 0 < int((last == padding).sum()) < len(last):
                return cls(each != padding, is_guess=True)
        return None


def _sequences(batch: Any) -> dict[str, Tensor]:
    """The fields in which each row is several whole numbers."""
    return {
        path.rpartition(".")[2]: value
        for path, value in take_apart(batch)[0]
        if isinstance(value, Tensor) and value.ndim == 2 and value.shape[1] > 1
        if not (value.is_floating_point() or value.is_complex())
    }


def _half(counts: Tensor) -> int:
    """The column behind half of what counts, in the row where that is last."""
    done = counts.flatten(2).any(2) if counts.ndim > 2 else counts
    done = done.long().cumsum(1)
    return int((2 * done < done[:, -1:]).sum(1).max()) + 1


def _is_constant(values: Tensor) -> bool:
    return bool((values == values[:1]).all())


def unlike_parts(
    counts: Tensor,
    sizes: Sequence[int],
    lengths: Sequence[int] | None = None,
    own: int | None = None,
    classes: Tensor | None = None,
    cut: Callable[[list[int]], Parts] | None = None,
) -> Parts:
    """Rows in parts that tell denominators apart, and widths.

    Of random choices, the one is taken in which the shares of the parts differ most
    often between denominators.

    >>> unlike_parts(torch.tensor([[1.0, 3], [1, 3], [1, 9]]), [1, 1], own=0)
    [[1], [2]]

    Args:
        counts: one row for each row, one column for each denominator.
        sizes: how many rows each part gets.
        lengths: of the rows, if parts should have unlike ones.
        own: a column, if that one must differ from others. Rows that count nothing by
            it are left out where others suffice.
        classes: one row for each row, one column for each class that rows may have.
        cut: cuts chosen rows as the run would; default: by sizes alone.
    """
    draw, pool = random.Random(0), list(range(len(counts)))
    classes = counts[:, :0] if classes is None else classes
    if own is not None:
        counting = [row for row in pool if float(counts[row, own]) > 0]
        pool = counting if len(counting) >= sum(sizes) else pool
    best: tuple[Any, Parts] = (), []
    bounds = [0, *itertools.accumulate(sizes)]
    for _ in range(TRIES if cut is None else TRIES // 8):
        order = draw.sample(pool, sum(sizes))
        parts = [sorted(order[a:b]) for a, b in itertools.pairwise(bounds)]
        parts = parts if cut is None else cut(sorted(order))
        shares = shares_of(counts, parts)
        if own is None:
            apart = torch.pdist(shares.T)
        else:
            apart = (shares - shares[:, [own]]).norm(dim=0)
            apart[:-1] *= counts[sum(parts, [])].sum(0) != 0  # else it says nothing
        clear = apart[apart > CLEAR]
        widths = {max(lengths[row] for row in part) for part in parts if lengths}
        # Parts of one class each would look alike to what counts classes.
        kinds = {tuple(sorted(classes[part].sum(0).tolist())) for part in parts}
        least = float(clear.min()) if len(clear) else 0.0
        score = (len(widths), len(kinds), len(clear), least)
        best = max(best, (score, parts), key=lambda each: each[0])
    return best[1]


def many_parts(counts: Tensor, number: int, *, is_equal: bool) -> Parts:
    """All rows in several parts, which tell as many denominators apart as can be.

    Args:
        counts: one row for each row, one column for each denominator.
        number: how many parts, if there are two rows for each.
        is_equal: whether all parts have as many rows.
    """
    rows = len(counts)
    number = max(2, min(number, rows // 2))
    sizes = [rows // number] * number
    if is_equal:
        return unlike_parts(counts, sizes)
    for place in range(rows % number):
        sizes[-1 - place] += 1
    for place in range(number // 2):  # the first are shorter, the last longer
        moves = min(sizes[place] - (1 if rows < 4 else 2), number // 2 - place)
        sizes[place] -= max(moves, 0)
        sizes[-1 - place] += max(moves, 0)
    return unlike_parts(counts, sizes)


def shares_of(counts: Tensor, parts: Parts) -> Tensor:
    """What each part weighs of all, by each denominator, and if all weigh alike."""
    in_parts = torch.stack([counts[part].sum(0) for part in parts])
    shares = in_parts / in_parts.sum(0).clamp_min(1e-9)
    return torch.cat([shares, torch.full((len(parts), 1), 1 / len(parts))], 1)


def number_of(weigh: Callable[[Any], Any], batch: Any) -> float:
    """What a batch weighs; 0 if that cannot be said."""
    try:
        found = float(weigh(batch))
    except Exception:
        return 0.0
    return found if abs(found) < float("inf") else 0.0


def samples_of(loader: Any, most: int) -> list[Any]:
    """Rows that a loader would read first, of unlike lengths; none of a stream."""
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        return []
    rows = Rows(loader).first(max(most, 48))
    if not _repeats(read_apart(loader.collate_fn), rows[:most]):
        return []
    if len(rows) <= most:
        return rows
    ordered = sorted(range(len(rows)), key=lambda i: num_elements(rows[i]))
    step = (len(ordered) - 1) / max(most - 1, 1)
    return [rows[i] for i in sorted({ordered[round(n * step)] for n in range(most)})]


def samples_across(loader: Any, number: int = 12) -> list[Any]:
    """Rows from all over a data set; none where it cannot be read like that, or where
    the collate function draws at random, so that no two batches of them are alike."""
    data = getattr(loader, "dataset", None)
    if isinstance(data, IterableDataset) or not isinstance(loader, DataLoader):
        return []
    with contextlib.suppress(Exception), random_kept():
        last: int = len(data) - 1  # type: ignore[arg-type]
        indices = {round(n * last / number) for n in range(number + 1)}
        rows = list(rows_at(read_apart(data), sorted(indices)))
        return rows if _repeats(read_apart(loader.collate_fn), rows) else []
    return []


def _repeats(collate: Callable[[list[Any]], Any], rows: list[Any]) -> bool:
    """Whether a collate function makes the same batch of the same rows again."""
    pairs = zip(*(take_apart(collate(list(rows)))[0] for _ in range(2)), strict=True)
    return all(
        torch.equal(one.nan_to_num(), other.nan_to_num())
        for (_, one), (_, other) in pairs
        if isinstance(one, Tensor)
    )


def collates_by_itself(loader: Any) -> bool:
    """Whether a loader has a collate function of its own."""
    own = getattr(loader, "collate_fn", default_collate)
    return getattr(own, "__module__", "").partition(".")[0] != "torch"


def has_equal_batches(loader: Any) -> bool:
    """Whether all batches of a loader have as many rows."""
    size, data = getattr(loader, "batch_size", None), getattr(loader, "dataset", None)
    if not isinstance(size, int) or not hasattr(data, "__len__"):
        return False
    return bool(getattr(loader, "drop_last", False)) or len(data) % size == 0  # type: ignore[arg-type]


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """The cutter warns when the run cuts the batch, not here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _on_host(batch: Any) -> Any:
    return with_tensors(batch, lambda tensor: tensor.detach().cpu())


def _is_mask(value: Tensor) -> bool:
    return value.dtype is torch.bool or bool(((value == 0) | (value == 1)).all())
