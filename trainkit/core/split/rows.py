"""The rows of a batch, and how long they are.

Lengths come from a mask or from the strategy's labels, by name. Samples that are not
collated yet have theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from trainkit.core.nested import (
    Path,
    describe,
    length_of,
    lookup,
)
from trainkit.core.split.partition import Span, width
from trainkit.core.strategies import AccumulationStrategy, PerToken
from trainkit.errors import TrainkitError

MASK = "attention_mask"
"""The field that tells rows' lengths where nobody names one."""


@dataclass(frozen=True)
class Rows:
    """The rows of a loader batch.

    Attributes:
        num_rows: how many there are.
        spans: for each width that ragged tensors have, the columns of each row: the
            first that is not padding, and that behind the last; empty if rows have no
            length. Samples have the paths of their lengths in place of widths.
        by_labels: the widths that labels alone tell, behind the last of which there may
            be tokens.
        times: how many masks a width has, each with tokens of its own; else one.
        are_joined: whether they are documents that stand one behind the other, so that
            nothing is padded.
    """

    num_rows: int
    spans: Mapping[Any, Sequence[Span]] = field(default_factory=dict)
    by_labels: Collection[int] = ()
    times: Mapping[int, int] = field(default_factory=dict)
    are_joined: bool = False

    @property
    def groups(self) -> list[Sequence[Span]]:
        """The spans of all masks."""
        return [s for w, s in self.spans.items() for _ in range(self.times.get(w, 1))]

    @property
    def lengths(self) -> list[int]:
        """How many tokens of each row are not padding."""
        return [self.real_of([row]) for row in range(self.num_rows)]

    @property
    def are_alike(self) -> bool:
        """Whether rows of one length are padded alike, so that no cut pads less."""
        return not self.are_joined and all(len({*each}) <= 1 for each in self.groups)

    @property
    def padded(self) -> int:
        """How many tokens the uncut batch computes; its rows if they have no length."""
        return self.padded_of(range(self.num_rows))

    def padded_of(self, rows: Sequence[int]) -> int:
        """How many tokens a micro-batch of these rows computes."""
        if self.are_joined or not self.spans or not rows:
            return self.real_of(rows)
        return len(rows) * width(self.groups, rows)

    def real_of(self, rows: Sequence[int]) -> int:
        """How many tokens of these rows are not padding."""
        if not self.spans:
            return len(rows)
        spans = [each[row] for each in self.groups for row in rows]
        return sum([stop - start for start, stop in spans])

    def of(self, rows: Sequence[int]) -> Rows:
        """Some of these rows, in this order."""
        spans = {w: [each[row] for row in rows] for w, each in self.spans.items()}
        return replace(self, num_rows=len(rows), spans=spans)

    def untrimmed(self) -> Rows:
        """A copy of these rows, in which all columns of a width count."""
        if self.are_joined:
            return self
        return replace(self, spans={w: [(0, w)] * self.num_rows for w in self.spans})


@dataclass(frozen=True, eq=False)
class Marks:
    """What counts in a mask or in labels, and where that is in the batch. Weights of
    tokens are as labels, unless they are named as what tells lengths."""

    path: Path
    tensor: Tensor
    counts: Tensor
    are_labels: bool = False

    @property
    def width(self) -> int:
        return self.counts.shape[1] if self.counts.ndim > 1 else 0


def marks_of(
    batch: Any, paths: Sequence[Path], strategy: AccumulationStrategy
) -> list[Marks]:
    """The masks of a batch, and the strategy's labels, alone or as wide as a mask.

    Labels that count are kept, also where the mask leaves them out.

    Args:
        batch: a loader batch.
        paths: of masks, or of the labels; without one, `"attention_mask"`.
        strategy: its labels or token weights tell lengths too.
    """
    labels, found = _labels(batch, strategy), []
    if not paths and isinstance(batch, Mapping):
        mask: Any = batch.get(MASK)
        paths = [MASK] if _is_mask(mask) and mask.ndim == 2 else []
    for path in paths:
        value = lookup(batch, path)
        if labels is not None and labels.tensor is value:
            found.append(labels)
        elif _is_mask(value):
            counts = (value != 0).flatten(2).any(2) if value.ndim > 2 else value != 0
            found.append(Marks(path, value, counts))
        else:
            raise _no_mask(path, value, batch)
    if labels is None or labels in found:
        return found
    labels = replace(labels, are_labels=True)
    joins = not found or labels.width in {each.width for each in found}
    return [*found, labels] if joins else found


def marked_rows(batch: Any, marks: Sequence[Marks], num_rows: int) -> Rows:
    """The rows of a batch with lengths, by the masks of each width; by labels where
    there is no mask of that width.

    Raises:
        TrainkitError: what tells lengths has another number of rows.
    """
    by_width: dict[int, list[Marks]] = {}
    for each in marks:
        if len(each.counts) != num_rows:
            raise _no_mask(each.path, each.tensor, batch, num_rows)
        if each.width and num_rows:
            by_width.setdefault(each.width, []).append(each)
    spans, times, by_labels = {}, {}, []
    for columns, alike in by_width.items():
        counts, *others = [each.counts for each in alike]
        for each in others:
            counts = counts | each
        if not (number := sum(not each.are_labels for each in alike)):
            by_labels.append(columns)
        spans[columns] = spans_of(counts, are_labels=not number)
        times[columns] = max(number, 1)
    return Rows(num_rows, spans, by_labels, times)


def spans_of(counts: Tensor, *, are_labels: bool = False) -> list[Span]:
    """The columns of each row, from the first that counts to the last; one column where
    none does.

    >>> import torch
    >>> spans_of(torch.tensor([[0, 1, 0, 1, 0], [0, 0, 0, 0, 0]]))
    [(1, 4), (0, 1)]

    Args:
        counts: is not 0 where a column counts.
        are_labels: before a first label may be a prompt, which counts as well; without
            one, a row may be full.
    """
    marks, width = (counts != 0).numpy(force=True), counts.shape[1]
    if marks.all():
        return [(0, width)] * len(marks)
    starts, stops = marks.argmax(1), width - marks[:, ::-1].argmax(1)
    if are_labels:
        starts[:] = 0
    else:
        stops[~marks.any(1)] = 1
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


def _labels(batch: Any, strategy: AccumulationStrategy) -> Marks | None:
    """The strategy's labels or token weights, if they are of rows or of tokens."""
    if not isinstance(strategy, PerToken):
        return None
    path = strategy.labels if strategy.mask is None else strategy.mask
    try:
        found = lookup(batch, path)
    except TrainkitError:
        return None  # weight() says so
    if not isinstance(found, Tensor) or found.is_nested or found.ndim not in (1, 2):
        return None
    if strategy.mask is not None:
        return Marks(path, found, found != 0)
    return Marks(path, found, found.long() != strategy.ignore_index, are_labels=True)


def _is_mask(value: Any) -> bool:
    """Whether it has rows and columns, and is no mask of negative numbers to add."""
    if not isinstance(value, Tensor) or value.is_nested or value.is_complex():
        return False
    is_added = value.is_floating_point() and bool((value < 0).any())
    return value.ndim > 1 and not is_added


def _no_mask(path: Path, found: Any, batch: Any, num_rows: int = 0) -> TrainkitError:
    rows = f"the {num_rows} rows of the batch" if num_rows else "rows"
    return TrainkitError(
        f"MicroBatching lengths {str(path)!r}: must be the path of a mask, {rows} by "
        f"columns, with 0 for padding, or of the strategy's labels, but leads to "
        f"{describe(found)} in the batch {describe(batch)}. Of numbers, make a mask "
        f"in the collate function: torch.arange(longest) < lengths[:, None]."
    )


def rows_of_samples(samples: Any, paths: Sequence[Path]) -> Rows:
    """How many samples there are in a list, and how long each is.

    Args:
        samples: they are cut first, and collated afterwards.
        paths: of a sample's lengths, or of what has them. Without one, samples are cut
            by their number.

    Raises:
        TrainkitError: the batch is not a list of samples, or something has no length.
    """
    if not isinstance(samples, list):  # a tuple is one of fields
        raise TrainkitError(
            f"MicroBatching collate: is for a loader that yields a list of samples, "
            f"received {describe(samples)}. Give the loader collate_fn=list, or leave "
            f"out collate."
        )
    spans = {}
    for path in paths:
        lengths = [_length_at(each, path, n) for n, each in enumerate(samples)]
        spans[path] = [(0, max(1, int(length))) for length in lengths]
    return Rows(len(samples), spans)


def _length_at(sample: Any, path: Path, place: int) -> Any:
    found: Any = lookup(sample, path)
    size = len(found) if isinstance(found, str | bytes) else length_of(found)
    number: Any = getattr(found, "item", lambda: found)() if size is None else size
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not is_number or number < 0 or number % 1 != 0:
        raise TrainkitError(
            f"MicroBatching lengths {str(path)!r}: must lead to a length of at least "
            f"0, or to something with one, but leads to {describe(found)} in sample "
            f"{place}, {describe(sample)}."
        )
    return number
