"""How each output of a call is joined of those of chunks, as two small runs of it show;
and which tensors are alike but for rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainkit.core.gradients import HALF
from trainkit.core.inside.rows import COLUMNS, ROWS, Axes, Axis, Chunk
from trainkit.core.nested import are_equal, is_dense
from trainkit.errors import TrainkitError


class Unfit(TrainkitError):
    """A reason why a call cannot run in chunks of rows."""


@dataclass(frozen=True)
class Joint:
    """How the chunks' values of one output become one value.

    Attributes:
        path: of the output, for messages.
        axes: that of its rows or tokens, then that of the columns that chunks leave
            out; none for a value that has no rows, which is the same for all of them.
    """

    path: str
    axes: Axes = ()

    @property
    def name(self) -> str:
        """The output's name for messages."""
        return f"its output {self.path!r}" if self.path else "its output"


Plan = Sequence[Joint]
"""How each output of one kind of call is joined."""


def plan_of(paths: Sequence[str], runs: Sequence[tuple[Chunk, Sequence[Any]]]) -> Plan:
    """Find how outputs are joined, by those of two numbers of rows.

    Args:
        paths: of the outputs.
        runs: rows, and the outputs for them; twice, with other numbers of rows.
    """
    (one, some), (other, others) = runs
    if len(some) != len(others):
        raise Unfit("the number of its outputs depends on the rows")
    counts = [each.counts for each in (one, other)]
    plan = [_joint(*three, counts) for three in zip(paths, some, others, strict=True)]
    if not any(joint.axes for joint in plan):
        raise Unfit("it returns nothing that has rows")
    return plan


def _joint(path: str, value: Any, other: Any, counts: list[dict[int, int]]) -> Joint:
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
    if not is_dense(value):
        raise Unfit(f"{name} is no dense tensor")
    dims = differing(value, other)
    if not dims:
        if not are_close(value, other):
            raise Unfit(
                f"{name}, of shape {list(value.shape)}, has no rows, and depends on "
                f"them"
            )
        return Joint(path)
    dim, (few, many) = dims[0], counts
    for unit, num in few.items():
        each, rest = divmod(value.shape[dim], num)
        if len(dims) == 1 and not rest and other.shape[dim] == each * many[unit]:
            return Joint(path, (Axis(dim, unit),))
    raise Unfit(
        f"the size of {name} does not follow the number of rows: {list(value.shape)} "
        f"for {few[ROWS]} rows, {list(other.shape)} for {many[ROWS]}"
    )


def differing(value: Tensor, other: Tensor) -> list[int]:
    """The dimensions in which two tensors of as many have other sizes."""
    return [d for d in range(value.ndim) if value.shape[d] != other.shape[d]]


def with_columns(plan: Plan, whole: Sequence[Any], narrow: Sequence[Any]) -> Plan:
    """A plan that knows which dimension of each output has columns.

    Args:
        plan: how outputs are joined.
        whole: the outputs for some rows with all columns.
        narrow: those for the same rows without the columns that are padding.
    """
    found = []
    for joint, one, other in zip(plan, whole, narrow, strict=True):
        dims = differing(one, other) if joint.axes else []
        # Rows and columns in one dimension do not fit, where they are joined.
        columns = [Axis(dim, COLUMNS) for dim in dims if dim != joint.axes[0].dim]
        found.append(Joint(joint.path, (*joint.axes, *columns[:1])))
    return found


def direction_of(value: Any, axes: Axes) -> Any:
    """A gradient that is another one for each row, whichever rows are beside it.

    Args:
        value: an output; what is no tensor has none.
        axes: of its rows.
    """
    if not isinstance(value, Tensor) or not axes:
        return torch.ones_like(value) if isinstance(value, Tensor) else None
    dim = axes[0].dim
    inner = value.detach().movedim(dim, 0)
    places = torch.arange(value.numel(), device=value.device).view(inner.shape)
    return places.double().mul(1.7).cos().movedim(0, dim).to(value.dtype)


ROUNDING, HALF_ROUNDING = 1024, 8
"""Runs of the same rows beside others may differ by so many units in the last place of
the largest entry; by fewer in half precision, in which a layer rounds only what it
returns."""

ON_DEVICE = 2**-18
"""The least unit of a device, whose kernels may round products to few digits (TF32)."""

OUTLIER = 1e6
"""Entries of this size, such as those of a mask, do not say what rounding is, where a
tenth of all is far smaller."""


def are_close(value: Tensor, other: Tensor, *, eps: float = 0.0) -> bool:
    """Whether two tensors differ by no more than rounding; waits for the device.

    Args:
        value: a tensor.
        other: another.
        eps: the unit in the last place, if something within was coarser.
    """
    if value.shape != other.shape or value.dtype != other.dtype:
        return False
    if not (value.is_floating_point() or value.is_complex()) or not value.numel():
        return torch.equal(value, other)
    wide = torch.promote_types(value.dtype, torch.float32)
    one, two = (torch.nan_to_num(x.detach().to(wide)) for x in (value, other))
    found, sizes = torch.finfo(value.dtype), one.abs()
    small = sizes.flatten().kthvalue(sizes.numel() // 10 + 1).values
    limit = (1e4 * small).clamp_min(min(OUTLIER, found.max / 9))
    usual = sizes.where(sizes < limit, 0).max()
    usual = usual.where(usual > 0, sizes.max())
    least = 0.0 if value.device.type == "cpu" else ON_DEVICE
    allowed = max(
        (HALF_ROUNDING if value.dtype in HALF else ROUNDING) * max(found.eps, least),
        HALF_ROUNDING * eps,
    )
    return not ((one - two).abs() > sizes.maximum(usual) * allowed).any()
