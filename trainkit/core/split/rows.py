"""Facts about a loader batch before it is cut: its rows and their lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from trainkit.core.split.partition import Span, width


@dataclass(frozen=True)
class Group:
    """The tensors that are ragged together: one padded length, one span for each row.

    Attributes:
        padded_length: the columns of the loader batch.
        spans: for each row the first column that is not padding, and the one behind
            the last.
        lengths: for each row, how many of its columns are no padding.
    """

    padded_length: int
    spans: Sequence[Span]
    lengths: Sequence[int]

    @classmethod
    def make(cls, padded_length: int, spans: Sequence[Span]) -> Group:
        """A group whose rows are as long as their spans."""
        return cls(padded_length, spans, [stop - start for start, stop in spans])

    @property
    def has_padding(self) -> bool:
        full = (0, self.padded_length)
        return any(span != full for span in self.spans)

    @property
    def begins_late(self) -> bool:
        """Whether a row has padding before its first column."""
        return any(start for start, _ in self.spans)

    def untrimmed(self) -> Group:
        """A copy of this group that gives every micro-batch all columns."""
        full = (0, self.padded_length)
        return replace(self, spans=[full] * len(self.spans))


@dataclass(frozen=True)
class Rows:
    """The rows of a loader batch.

    Attributes:
        num_rows: how many there are.
        groups: their lengths, for each group of ragged tensors; empty where a row has
            no length.
    """

    num_rows: int
    groups: Sequence[Group] = field(default=())

    @property
    def has_lengths(self) -> bool:
        return bool(self.groups) and self.num_rows > 0

    @property
    def are_alike(self) -> bool:
        """Whether any cut of as many micro-batches pads as much."""
        return all(len(set(group.spans)) == 1 for group in self.groups)

    @property
    def begin_late(self) -> bool:
        """Whether a row has padding before its first column."""
        return any(group.begins_late for group in self.groups)

    @property
    def spans(self) -> list[Sequence[Span]]:
        return [group.spans for group in self.groups]

    @property
    def padded(self) -> int:
        """What the uncut batch computes: its tokens, or its rows without lengths."""
        return self.padded_of(range(self.num_rows))

    def padded_of(self, rows: Sequence[int]) -> int:
        """The tokens that a micro-batch of these rows computes."""
        if not self.has_lengths:
            return len(rows)
        return len(rows) * width(self.spans, rows)

    def real_of(self, rows: Sequence[int]) -> int:
        """The tokens of these rows without padding."""
        if not self.has_lengths:
            return len(rows)
        return sum([group.lengths[row] for group in self.groups for row in rows])

    def longest_over(self, tokens: int) -> int | None:
        """The length of the longest row that exceeds a budget by itself."""
        rows = zip(*self.spans, strict=True)
        longest = max(sum([stop - start for start, stop in row]) for row in rows)
        return longest if longest > tokens else None


def merged(groups: Sequence[Group]) -> list[Group]:
    """Groups that happen to have the same padded length are trimmed alike.

    A tensor's group is known by its length; of two that coincide, a column goes only
    if it is padding in both.
    """
    made = []
    for group in groups:
        alike = [
            each.spans for each in groups if each.padded_length == group.padded_length
        ]
        spans = [
            (min(start for start, _ in row), max(stop for _, stop in row))
            for row in zip(*alike, strict=True)
        ]
        made.append(replace(group, spans=spans))
    return made
