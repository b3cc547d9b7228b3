"""Facts about a loader batch before it is cut: its rows and their lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from trainkit.core.split.partition import Span, width


@dataclass(frozen=True)
class Group:
    """The tensors that are ragged together: one padded length, one span for each row.

    Attributes:
        padded_length: the number of columns in the loader batch.
        spans: for each row the first column that is not padding, and the column behind
            the last.
        lengths: for each row, how many of its columns are not padding.
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
    def begin_late(self) -> bool:
        """Whether a row has padding before its first column."""
        return any(group.begins_late for group in self.groups)

    @property
    def spans(self) -> list[Sequence[Span]]:
        return [group.spans for group in self.groups]

    @property
    def padded(self) -> int:
        """How many tokens the uncut batch computes; its rows if they have no length."""
        return self.padded_of(range(self.num_rows))

    def padded_of(self, rows: Sequence[int]) -> int:
        """How many tokens a micro-batch of these rows computes."""
        if not self.has_lengths:
            return len(rows)
        return len(rows) * width(self.spans, rows)

    def real_of(self, rows: Sequence[int]) -> int:
        """How many tokens of these rows are not padding."""
        if not self.has_lengths:
            return len(rows)
        return sum([group.lengths[row] for group in self.groups for row in rows])

    def longest_over(self, tokens: int) -> int | None:
        """The length of the longest row that exceeds a budget by itself."""
        rows = zip(*self.spans, strict=True)
        longest = max(sum([stop - start for start, stop in row]) for row in rows)
        return longest if longest > tokens else None


def merged(groups: Sequence[Group]) -> list[Group]:
    """Groups in which those of equal padded length also have equal spans.

    A tensor's group is known by its padded length alone. If two groups have one padded
    length, a column goes only if it is padding in both.
    """
    made = []
    for group in groups:
        equal = [g.spans for g in groups if g.padded_length == group.padded_length]
        spans = [
            (min(start for start, _ in row), max(stop for _, stop in row))
            for row in zip(*equal, strict=True)
        ]
        made.append(replace(group, spans=spans))
    return made
