"""How the outputs of chunks become those of a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainkit.core.inside.chunks import Chunk
from trainkit.core.inside.closeness import are_close, are_equal
from trainkit.core.nested import Field
from trainkit.errors import TrainkitError

Sizes = tuple[int, int]


class Unfit(TrainkitError):
    """A reason why a call cannot run in chunks of rows."""


@dataclass(frozen=True)
class Joint:
    """How the chunks' values of one output become one value.

    Attributes:
        path: of the output, for messages.
        dim: the dimension that holds the rows; None for a value that has none, which is
            the same for all rows.
        multiple: how many entries of it belong to a row.
        padded: the dimension of columns that chunks leave out, if there is one.
    """

    path: str
    dim: int | None = None
    multiple: int = 1
    padded: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The output's name for messages."""
        return f"its output {self.path!r}" if self.path else "its output"


Plan = Sequence[Joint]
"""How each output of one kind of call is joined."""


def plan_of(
    some: Sequence[Field], others: Sequence[Any], rows: Sizes, columns: Sizes
) -> Plan:
    """Find how outputs are joined, by those of two runs of another size.

    Args:
        some: the outputs of one run, with their paths.
        others: the outputs of another run.
        rows: how many rows these two had; not the same number.
        columns: how many columns they had.
    """
    if len(some) != len(others):
        raise Unfit("the number of its outputs depends on the rows")
    pairs = zip(some, others, strict=True)
    plan = [_joint(one, other, rows, columns) for one, other in pairs]
    if all(joint.dim is None for joint in plan):
        raise Unfit("it returns nothing that has rows")
    return plan


def _joint(field: Field, other: Any, rows: Sizes, columns: Sizes) -> Joint:
    path, value = field
    name = Joint(path).name
    if not isinstance(value, Tensor):
        if not are_equal(value, other):
            raise Unfit(
                f"{name} is a {type(value).__name__}, which cannot be joined from "
                f"those of chunks"
            )
        return Joint(path)
    if not isinstance(other, Tensor) or other.ndim != value.ndim:
        raise Unfit(f"the shape of {name} depends on the rows")
    if value.is_nested or value.layout is not torch.strided:
        raise Unfit(f"{name} is no dense tensor")
    sizes = list(zip(value.shape, other.shape, strict=True))
    dims = [dim for dim, (one, two) in enumerate(sizes) if one != two]
    if not dims:
        if not are_close(value, other):
            raise Unfit(
                f"{name}, of shape {list(value.shape)}, has no rows, and depends on "
                f"them"
            )
        return Joint(path)
    of_rows = [d for d in dims if sizes[d][0] * rows[1] == sizes[d][1] * rows[0]]
    dim = next((d for d in of_rows if sizes[d][0] % rows[0] == 0), None)
    padded = tuple(each for each in dims if each != dim)
    if dim is None or len(padded) > 1 or any(sizes[d] != columns for d in padded):
        raise Unfit(
            f"the size of {name} does not follow the number of rows: "
            f"{list(value.shape)} for {rows[0]} rows, {list(other.shape)} for {rows[1]}"
        )
    return Joint(path, dim, sizes[dim][0] // rows[0], padded)


def rows_of(value: Tensor, joint: Joint, rows: Sequence[int]) -> Tensor:
    """Some rows of an output that has rows, in this order."""
    assert joint.dim is not None
    index = torch.as_tensor(rows, device=value.device)
    parts = value.unflatten(joint.dim, (-1, joint.multiple))
    return parts.index_select(joint.dim, index).flatten(joint.dim, joint.dim + 1)


def join(
    plan: Plan,
    chunks: Sequence[Chunk],
    outputs: Sequence[Sequence[Any]],
    name: str,
    width: int = 0,
) -> list[Any]:
    """The outputs of a call, of those of its chunks.

    Args:
        plan: how they are joined.
        chunks: of the call.
        outputs: of each chunk.
        name: of the module, for messages.
        width: how many columns there are, where chunks leave some out.
    """
    if unlike := [len(each) for each in outputs if len(each) != len(plan)]:
        raise TrainkitError(
            f"{name}: the number of its outputs depends on the rows: {len(plan)} "
            f"before, {unlike[0]} now. Name a module within it, or around it."
        )
    return [
        _same(joint, values, name)
        if joint.dim is None
        else torch.cat(_pieces(joint, chunks, values, name, width), joint.dim)
        for joint, *values in zip(plan, *outputs, strict=True)
    ]


def _pieces(
    joint: Joint, chunks: Sequence[Chunk], values: list[Any], name: str, width: int
) -> list[Tensor]:
    """The values of one output that has rows, with all columns."""
    first, pieces = values[0], []
    for chunk, value in zip(chunks, values, strict=True):
        start, stop = chunk.columns or (0, width)
        wanted = got = None
        if isinstance(first, Tensor) and isinstance(value, Tensor):
            shape = list(first.shape)
            if joint.dim is not None and joint.dim < len(shape):
                shape[joint.dim] = (chunk.stop - chunk.start) * joint.multiple
            for dim in joint.padded:
                shape[dim] = stop - start
            wanted, got = (first.dtype, shape), (value.dtype, list(value.shape))
        if got is None or got != wanted:
            raise TrainkitError(
                f"{name}: {joint.name} must have one shape and dtype beside its rows, "
                f"to be joined: {wanted or 'a tensor'} was expected for a chunk, "
                f"received {got or type(value)}. Name a module within it, or around it."
            )
        if joint.padded:
            behind = 2 * (value.ndim - 1 - joint.padded[0])
            value = F.pad(value, [0] * behind + [start, width - stop])
        pieces.append(value.detach())
    return pieces


def _same(joint: Joint, values: list[Any], name: str) -> Any:
    """The last value of an output without rows. On a device all are compared when rows
    are looked at, since reading them waits."""
    last = values[-1]
    for value in values[:-1]:
        if isinstance(value, Tensor) and isinstance(last, Tensor):
            is_same = value.shape == last.shape and value.dtype == last.dtype
            if is_same and value.device.type == "cpu":
                is_same = are_close(value, last)
        else:
            is_same = are_equal(value, last)
        if not is_same:
            raise TrainkitError(
                f"{name}: {joint.name} has no rows, and must be the same for all "
                f"chunks, but it was {_shown(value)} for one and {_shown(last)} for "
                f"another. Name a module within it, or around it."
            )
    return last.detach().clone() if isinstance(last, Tensor) else last


def _shown(value: Any) -> str:
    if isinstance(value, Tensor) and value.numel() > 1:
        return f"another tensor of shape {list(value.shape)}"
    return repr(value.item() if isinstance(value, Tensor) else value)
