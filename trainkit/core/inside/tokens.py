"""Chunks of rows of like length, without the columns that are padding in all of them.

The rows are sorted by length before the module runs, and what it returns is sorted back
after it. A chunk is then a block of rows and of columns. A dimension is cut that is as
wide as the mask, and was so in all calls before. Where an output was left out as
padding it is 0, and the loss must give it no weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainkit.core.batch_norm.layers import listed
from trainkit.core.inside.outputs import Plan
from trainkit.core.inside.rows import (
    COLUMNS,
    Arguments,
    Axes,
    Axis,
    Chunk,
    Sizes,
    runs_of,
)
from trainkit.core.plan.options import check_whole_number
from trainkit.core.split.partition import Span, columns_of, partition
from trainkit.core.split.rows import spans_of
from trainkit.errors import TrainkitError

LENGTHS = "attention_mask"


@dataclass
class Sorted(Arguments):
    """The arguments of a call whose rows are sorted by length.

    Attributes:
        order: of the rows, longest first.
        tokens: the columns of each row that are not padding, in that order.
    """

    order: list[int] = field(default_factory=list)
    tokens: list[Span] = field(default_factory=list)

    def restored(self, leaves: Sequence[Any], plan: Plan) -> list[Any]:
        """The leaves of the output with their rows as they were."""
        places = sorted(range(len(self.order)), key=self.order.__getitem__)
        pairs, rows = zip(leaves, plan, strict=True), self.chunk(places)
        return [rows.of(leaf, joint.axes[:1]) for leaf, joint in pairs]

    def marks(self, value: Tensor, axes: Axes, rows: Sequence[int]) -> Tensor:
        """1 where an output of some rows is no padding."""
        spans = torch.tensor([self.tokens[row] for row in rows], device=value.device)
        columns = torch.arange(self.width, device=value.device)
        marks = (columns >= spans[:, :1]) & (columns < spans[:, 1:])
        dim, dim_of_columns = (axis.dim for axis in axes[:2])
        shape = [1] * value.ndim
        for at, of in enumerate((dim, dim_of_columns)):
            marks = marks.repeat_interleave(value.shape[of] // marks.shape[at], at)
            shape[of] = marks.shape[at]
        return (marks if dim < dim_of_columns else marks.T).reshape(shape)


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

    def allows(self, rows: int, tokens: int) -> bool:
        """Whether a chunk may have so many rows and tokens."""
        return tokens <= self._tokens and rows <= (self._size or rows)

    def sort(self, arguments: Arguments, name: str) -> Sorted:
        """Read the lengths, which waits for the device once, and sort and cut the rows.

        Args:
            arguments: of a call.
            name: of the module, for messages.
        """
        values, rows = arguments.values, arguments.rows
        mask = self._mask(arguments, name)
        spans, width = spans_of(mask), mask.shape[1]
        groups = partition([spans], size=self._size, tokens=self._tokens)
        order = [row for group in groups for row in group]
        columns = [range(*columns_of([spans], group)[0]) for group in groups]
        pairs = zip(runs_of([*map(len, groups)]), columns, strict=True)
        totals = rows, 0, width
        axes = [self._axes(arguments, index, width) for index in range(len(values))]
        of_rows = {
            "values": arguments.of(arguments.chunk(order), values),
            "sizes": self.sizes(width, rows),
            # Where each chunk has all columns, none has an axis of them.
            "axes": arguments.axes if {*columns} == {range(width)} else axes,
            "totals": totals,
            "parts": [Chunk((run, (), of_run), totals) for run, of_run in pairs],
        }
        return Sorted(
            **{**vars(arguments), **of_rows},
            order=order,
            tokens=[spans[row] for row in order],
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

    def _axes(self, arguments: Arguments, index: int, width: int) -> Axes:
        """Of an argument: a dimension of columns is as wide as the mask in all
        calls."""
        path, value = arguments.paths[index], arguments.values[index]
        axes = arguments.axes[index]
        for dim in range(len(axes), value.ndim) if isinstance(value, Tensor) else ():
            fits = value.shape[dim] == width
            self._wide[path, dim] = fits and self._wide.get((path, dim), True)
            if self._wide[path, dim]:
                axes = *axes, Axis(dim, COLUMNS)
        return axes


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
        if gradient is None or len(joint.axes) < 2:
            continue
        is_used = gradient != 0
        for chunk in chunks:
            chunk.of(is_used, joint.axes).fill_(False)
        if is_used.any():
            raise TrainkitError(
                f"{name}: {joint.name} at padding is used by the loss, and with "
                f"tokens= it is 0 where no row of a chunk needs it. Give padding no "
                f"weight in the loss (a mask marks tokens by 1 or True), or cut by "
                f"size= alone."
            )
