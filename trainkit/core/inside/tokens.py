"""Chunks of rows of like length, without the columns that are padding in all of them.

The rows are sorted by length before the module runs, and what it returns is sorted back
after it. A chunk is then a block of rows and of columns. A dimension is cut that is as
wide as the mask, and was so in all calls before. Where an output was left out as
padding it is 0, and the loss must give it no weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from trainkit.core.batch_norm.layers import listed
from trainkit.core.inside.outputs import Plan, rows_of
from trainkit.core.inside.rows import Arguments, ByLength, Chunk, Sizes, reordered
from trainkit.core.plan.options import check_whole_number
from trainkit.core.split.partition import columns_of, partition
from trainkit.core.split.rows import spans_of
from trainkit.errors import TrainkitError

LENGTHS = "attention_mask"


class ByTokens:
    """Cuts calls by a budget of tokens.

    Args:
        tokens: the most tokens of a chunk: its rows times the columns it keeps.
        lengths: the name of the argument that is a mask of rows and columns, 0 at
            padding; default: `"attention_mask"`.
        size: the most rows of a chunk.
    """

    def __init__(self, tokens: int, lengths: str | None, size: int | None) -> None:
        check_whole_number("Chunked tokens", tokens)
        self._tokens, self._size = tokens, size
        self._lengths = lengths or LENGTHS
        self._wide: dict[tuple[str, int], bool] = {}  # as wide as the mask, always

    def sizes(self, width: int, rows: int) -> Sizes:
        """Of chunks whose rows are all so wide."""
        most = max(1, self._tokens // max(width, 1))
        return Sizes(min(most, self._size or rows))

    def allows(self, tokens: int, rows: int) -> bool:
        """Whether a chunk may have so many."""
        return tokens <= self._tokens and rows <= (self._size or rows)

    def sort(self, arguments: Arguments, name: str) -> Arguments:
        """Read the lengths, which waits for the device once, and sort and cut the rows.

        Args:
            arguments: of a call.
            name: of the module, for messages.

        Returns:
            The arguments in the order of their lengths.
        """
        paths, values, rows = arguments.paths, arguments.values, arguments.rows
        mask = self._mask(arguments, name)
        spans, width = spans_of(mask), mask.shape[1]
        groups = partition([spans], size=self._size, tokens=self._tokens)
        ends = list(accumulate(map(len, groups)))
        chunks = [
            Chunk(start, stop, columns_of([spans], group)[0])
            for start, stop, group in zip([0, *ends], ends, groups, strict=False)
        ]
        fields = list(zip(paths, values, arguments.cut, strict=True))
        padded = [self._padded(*each, width) for each in fields]
        if all(chunk.columns == (0, width) for chunk in chunks):
            padded = [()] * len(values)
        order = [row for group in groups for row in group]
        spans = [spans[row] for row in order]
        return replace(
            arguments,
            values=[reordered(x, order) if is_cut else x for _, x, is_cut in fields],
            by_length=ByLength(order, chunks, spans, width),
            sizes=self.sizes(width, rows),
            padded=padded,
        )

    def _mask(self, arguments: Arguments, name: str) -> Tensor:
        paths, rows = arguments.paths, arguments.rows
        if self._lengths not in paths:
            raise TrainkitError(
                f"{name}: a budget of tokens needs the rows' lengths, and its "
                f"arguments are {listed(paths, at_most=9)}. Pass {self._lengths!r} by "
                f"name, or name in lengths= the argument that is a mask. In one row, "
                f"cu_seq_lens_q, seq_idx or position_ids tell documents apart."
            )
        mask = arguments.values[paths.index(self._lengths)]
        if not isinstance(mask, Tensor) or mask.ndim != 2 or len(mask) != rows:
            shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask)
            raise TrainkitError(
                f"{name}: lengths {self._lengths!r} must be a mask of {rows} rows and "
                f"their columns, 1 or True at tokens, received {shape}."
            )
        return mask

    def _padded(
        self, path: str, value: Any, has_rows: bool, width: int
    ) -> tuple[int, ...]:
        dims = range(has_rows, value.ndim) if isinstance(value, Tensor) else ()
        for dim in dims:
            fits = value.shape[dim] == width
            self._wide[path, dim] = fits and self._wide.get((path, dim), True)
        return tuple(dim for dim in dims if self._wide[path, dim])

    def restored(
        self, leaves: Sequence[Any], arguments: Arguments, plan: Plan
    ) -> list[Any]:
        """The leaves of the output with their rows as they were."""
        assert arguments.by_length is not None
        order = arguments.by_length.order
        places = sorted(range(len(order)), key=order.__getitem__)
        return [
            leaf if joint.dim is None else rows_of(leaf, joint, places)
            for leaf, joint in zip(leaves, plan, strict=True)
        ]


def refuse_padding(
    gradients: Sequence[Tensor | None],
    plan: Plan,
    chunks: Sequence[Chunk],
    name: str,
) -> None:
    """Refuse a gradient where the output was left out; waits for the device.

    Args:
        gradients: of the output's leaves.
        plan: how they are joined.
        chunks: of the call.
        name: of the module, for messages.
    """
    for gradient, joint in zip(gradients, plan, strict=True):
        if gradient is None or not joint.padded:
            continue
        used = []
        for chunk in chunks:
            rows = chunk.part(gradient, joint.dim, joint.multiple)
            columns = rows.movedim(joint.padded[0], 0)
            first, behind = chunk.columns or (0, len(columns))
            used += [columns[:first].any(), columns[behind:].any()]
        if torch.stack(used).any():
            raise TrainkitError(
                f"{name}: {joint.name} at padding is used by the loss, and with "
                f"tokens= it is 0 where no row of a chunk needs it. Give padding no "
                f"weight in the loss (a mask marks tokens by 1 or True), or cut by "
                f"size= alone."
            )
