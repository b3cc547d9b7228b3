"""Few shapes: micro-batches that are filled with what weighs nothing.

A flattened row is filled by one more document, of ignored labels.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainkit.core.document_fields import IGNORED
from trainkit.core.split.layout import Nothing, Shape
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.split.partition import first_fit, width
from trainkit.core.split.rows import Rows
from trainkit.core.strategies import Strategies
from trainkit.errors import TrainkitError


def shapes_of(options: MicroBatching, *, are_joined: bool = False) -> list[Shape]:
    """The shapes that micro-batches may have, the narrowest first.

    >>> shapes_of(MicroBatching(tokens=64, shapes=3))
    [(16, 4), (4, 16), (1, 64)]
    >>> shapes_of(MicroBatching(tokens=64, shapes=3), are_joined=True)
    [(1, 16), (1, 32), (1, 64)]
    >>> shapes_of(MicroBatching(tokens=64, shapes=(32, 20)))
    [(3, 20), (2, 32)]

    Args:
        options: the budget of tokens, and how many shapes or which widths.
        are_joined: whether rows are documents, one behind the other.
    """
    tokens, shapes = options.tokens or 0, options.shapes or 0
    widths = shapes
    if isinstance(widths, int):
        widths = [tokens // (2 if are_joined else 4) ** i for i in range(widths)]
    most = options.size or tokens
    return [
        (1 if are_joined else min(most, tokens // each), each)
        for each in sorted(set(widths) - {0})
    ]


def nothing_of(strategies: Strategies) -> Nothing:
    """What a row must have in which nothing counts."""
    found: dict[str | int, float] = {}
    for each in strategies.values():
        mask, labels = getattr(each, "mask", None), getattr(each, "labels", None)
        if mask is not None:
            found[mask] = 0
        elif labels is not None:
            found[labels] = getattr(each, "ignore_index", IGNORED)
    return found


class Shapes:
    """The few shapes of a run's micro-batches.

    Args:
        options: the budget of tokens, and how many shapes or which widths.
    """

    def __init__(self, options: MicroBatching) -> None:
        self._options = options

    def of(self, rows: Rows, part: Sequence[int]) -> Shape:
        """The least shape in which rows of a loader batch fit.

        Raises:
            TrainkitError: there is none.
        """
        shapes = shapes_of(self._options, are_joined=rows.are_joined)
        joined = rows.real_of(part) if rows.are_joined else width(rows.spans, part)
        for shape in shapes:
            if joined <= shape[1]:
                return shape
        raise TrainkitError(
            f"MicroBatching shapes: row {part[0]} of the loader batch has {joined} "
            f"tokens, and the widest of the {len(shapes)} shapes has {shapes[-1][1]}. "
            f"Shorten such rows in the data set; or let a shape hold them: a larger "
            f"budget, tokens={joined}, and widths with it, shapes=({joined}, ...)."
        )

    def parts(self, rows: Rows) -> list[list[int]]:
        """As few micro-batches as these shapes allow.

        All shapes cost about the budget, so each is filled, the longest rows first.
        """
        if len(rows.groups) > 1:
            raise TrainkitError(
                f"MicroBatching shapes: rows must have one length each, and the batch "
                f"has {len(rows.groups)}, of {len(rows.groups)} masks. Name one of "
                f"them, lengths='path.to.mask', or leave shapes out."
            )
        lengths = [rows.real_of([row]) for row in range(rows.num_rows)]
        order = sorted(range(rows.num_rows), key=lengths.__getitem__, reverse=True)
        shape = self.of(rows, order[:1]) if order else (0, 0)
        if rows.are_joined:
            widest = shapes_of(self._options, are_joined=True)[-1][1]
            return first_fit(lengths, widest, self._options.size)
        parts: list[list[int]] = []
        for row in order:
            part = [*parts[-1], row] if parts else [row]
            # Rows that pad on different sides are together wider than each.
            fits = len(part) <= shape[0] and width(rows.spans, part) <= shape[1]
            if parts and fits:
                parts[-1] = part
            else:
                parts.append([row])
                shape = self.of(rows, [row])
        return parts
