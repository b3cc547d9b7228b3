"""The rows of a batch, and how long they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from trainkit.core.nested import Path, describe, is_array, is_list, lookup, parts_of
from trainkit.core.split.partition import Span, width
from trainkit.errors import TrainkitError


@dataclass(frozen=True)
class Group:
    """The tensors that are ragged together: one padded length, one span for each row.

    Attributes:
        padded_length: the number of columns in the loader batch.
        spans: for each row the first column that is not padding, and the column behind
            the last.
    """

    padded_length: int
    spans: Sequence[Span]

    @property
    def lengths(self) -> list[int]:
        """For each row, how many of its columns are not padding."""
        return [stop - start for start, stop in self.spans]

    @property
    def has_padding(self) -> bool:
        full = (0, self.padded_length)
        return any(span != full for span in self.spans)


@dataclass(frozen=True)
class Rows:
    """The rows of a loader batch.

    Attributes:
        num_rows: how many there are.
        groups: their lengths, for each group of ragged tensors; empty if rows have no
            length.
    """

    num_rows: int
    groups: Sequence[Group] = field(default=())

    @property
    def has_lengths(self) -> bool:
        return bool(self.groups) and self.num_rows > 0

    @property
    def are_alike(self) -> bool:
        """Whether all rows have one length, so that no cut pads less than another."""
        return all(len(set(group.spans)) == 1 for group in self.groups)

    @property
    def spans(self) -> list[Sequence[Span]]:
        return [group.spans for group in self.groups]

    @property
    def padded(self) -> int:
        """How many tokens the uncut batch computes; its rows if they have no length."""
        return self.padded_of(range(self.num_rows))

    def padded_of(self, rows: Sequence[int]) -> int:
        """How many tokens a micro-batch of these rows computes."""
        if not self.has_lengths or not rows:
            return len(rows)
        return len(rows) * width(self.spans, rows)

    def real_of(self, rows: Sequence[int]) -> int:
        """How many tokens of these rows are not padding."""
        if not self.has_lengths:
            return len(rows)
        spans = [group.spans[row] for group in self.groups for row in rows]
        return sum([stop - start for start, stop in spans])


def rows_of_samples(samples: Any, paths: Sequence[Path]) -> Rows:
    """How many samples there are in a list, and how long each is.

    Args:
        samples: they are cut first, and collated afterwards.
        paths: of a sample's lengths, or of what has them. Without one, it is the
            longest leading dimension in the sample. Samples in which nothing has a
            length are cut by their number.

    Raises:
        TrainkitError: the batch is not a list of samples, or something has no length.
    """
    if not is_list(samples):
        raise TrainkitError(
            f"MicroBatching collate: is for a loader that yields a list of samples, "
            f"received {describe(samples)}. Give the loader collate_fn=list, or leave "
            f"out collate."
        )
    columns = [
        [_length_at(each, path, number) for number, each in enumerate(samples)]
        for path in paths
    ]
    if not paths:
        longest = [_longest(each) for each in samples]
        columns = [] if None in longest else [longest]
    groups = []
    for column in columns:
        spans = [(0, max(1, length or 1)) for length in column]
        groups.append(Group(max((stop for _, stop in spans), default=1), spans))
    return Rows(len(samples), groups)


def _length_at(sample: Any, path: Path, place: int) -> int | None:
    found = lookup(sample, path)
    number: Any = found
    if is_array(found):
        number = found.shape[0]
    elif isinstance(found, str | bytes | list | tuple):
        number = len(found)
    elif isinstance(found, Tensor) or hasattr(found, "dtype"):
        number = found.item()
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not is_number or number != int(number) or number < 0:
        raise TrainkitError(
            f"MicroBatching lengths {str(path)!r}: must lead to a length of at least "
            f"0, or to something with one, but leads to {describe(found)} in sample "
            f"{place}, {describe(sample)}."
        )
    return int(number)


def _longest(value: Any) -> int | None:
    """The longest leading dimension of the tensors and lists of a sample."""
    if is_array(value):
        return value.shape[0]
    parts = parts_of(value)
    if parts is None:
        return None
    found = [_longest(part) for _, part in parts]
    if isinstance(value, list) and all(each is None for each in found):
        return len(value)  # token ids
    return max((length for length in found if length is not None), default=None)
