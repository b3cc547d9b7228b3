"""What is padding in a module's outputs, and whether a loss uses it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.core.inside.chunks import Chunk
from trainkit.core.inside.draws import are_same, torch_states
from trainkit.core.inside.rows import Joint, Plan, Unfit, are_close, output_name
from trainkit.core.out_of_memory import is_out_of_memory
from trainkit.core.split.fields import take_apart
from trainkit.core.split.partition import Span
from trainkit.errors import TrainkitError


def with_columns(values: Sequence[Any], plan: Plan, width: int) -> tuple[bool, ...]:
    """Whether dimension 1 of each argument has the padded length."""
    return tuple(
        isinstance(value, Tensor)
        and value.ndim > 1
        and value.shape[1] == width
        and (multiple == 1 or (multiple == 0 and value.shape[0] == 1))
        for value, multiple in zip(values, plan.multiples, strict=True)
    )


def padded_plan(
    plan: Plan,
    run: Callable[[list[Any]], Any],
    values: Sequence[Any],
    sample: tuple[Chunk, Sequence[Span]],
    modes: Sequence[tuple[nn.Module, bool]],
) -> Plan:
    """Find which dimensions of outputs are columns, and that no row looks at padding.

    Args:
        plan: which also knows the columns of arguments.
        run: runs the module on other arguments, with the same draws each time.
        values: the arguments.
        sample: a chunk that leaves out columns, and the columns of its rows.
        modes: of the module and its parts; put into evaluation mode if they draw.
    """
    chunk, spans = sample
    all_columns = replace(chunk, columns=None)

    def outputs(part: Chunk) -> list[Any]:
        each = zip(values, plan.multiples, plan.columns, strict=True)
        given = [part.part(v, 0, m, c) if m or c else v for v, m, c in each]
        return [field.value for field in take_apart(run(given))[0]]

    before = torch_states(())
    whole = outputs(all_columns)
    if not are_same(before, torch_states(())):
        for each, _ in modes:
            each.training = False  # other columns would have other draws
        whole = outputs(all_columns)
    try:
        narrow = outputs(chunk)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise Unfit(
            f"it does not run without columns that are padding: "
            f"{type(error).__name__}: {error}"
        ) from error
    pairs = zip(plan.joints, plan.paths, whole, narrow, strict=True)
    joints = [_joint(*each, chunk, spans) for each in pairs]
    return replace(plan, joints=tuple(joints))


def _joint(
    joint: Joint,
    path: str,
    whole: Any,
    narrow: Any,
    chunk: Chunk,
    spans: Sequence[Span],
) -> Joint:
    """How an output is joined, given its values with all columns and with some."""
    if joint.dim is None or not isinstance(whole, Tensor) or chunk.columns is None:
        return joint
    joint = replace(
        joint, padded=_padded(whole, narrow, joint.dim, chunk.columns, path)
    )
    if joint.padded is not None:
        start, stop = chunk.columns
        whole = whole.narrow(joint.padded, start, stop - start)
    real = _real(whole, spans, chunk, joint)
    if not are_close(whole * real, narrow * real):
        raise Unfit(
            f"{output_name(path)} of a row depends on the columns that are padding"
        )
    return joint


def _padded(
    whole: Tensor, narrow: Any, rows: int, columns: Span, path: str
) -> int | None:
    """The dimension of an output that has the columns; None if it has none."""
    sizes = list(zip(whole.shape, narrow.shape, strict=False))
    dims = [dim for dim, (one, other) in enumerate(sizes) if one != other]
    if not dims and whole.ndim == narrow.ndim:
        return None
    width = columns[1] - columns[0]
    if len(dims) != 1 or dims[0] == rows or narrow.shape[dims[0]] != width:
        raise Unfit(
            f"the size of {output_name(path)} does not follow the number of columns: "
            f"{list(whole.shape)} for all, {list(narrow.shape)} for {width} of them"
        )
    return dims[0]


def _real(value: Tensor, spans: Sequence[Span], chunk: Chunk, joint: Joint) -> Tensor:
    """1 where an output is no padding."""
    marks = torch.ones_like(value, dtype=torch.bool)
    if joint.padded is None or joint.dim is None or chunk.columns is None:
        return marks
    start, stop = chunk.columns
    for row, (first, behind) in enumerate(spans):
        own = marks.narrow(joint.dim, row * joint.multiple, joint.multiple)
        own.narrow(joint.padded, 0, first - start).zero_()
        own.narrow(joint.padded, behind - start, stop - behind).zero_()
    return marks


class PaddingCheck:
    """Looks in backward passes 1, 2, 4, 8, ... whether the loss used padding."""

    def __init__(self) -> None:
        self._num_passes = 0

    def look(
        self,
        gradients: Sequence[Tensor | None],
        plan: Plan,
        chunks: Sequence[Chunk],
        name: str,
    ) -> None:
        """Refuse a gradient where the output was left out.

        Args:
            gradients: of the output's leaves.
            plan: how they are joined.
            chunks: of the call.
            name: of the module, for messages.
        """
        self._num_passes += 1
        if self._num_passes & (self._num_passes - 1):
            return
        for gradient, joint, path in zip(
            gradients, plan.joints, plan.paths, strict=True
        ):
            if gradient is None or joint.dim is None or joint.padded is None:
                continue
            parts = [
                chunk.part(gradient, joint.dim, joint.multiple, joint.padded)
                for chunk in chunks
            ]
            inside = torch.stack([part.count_nonzero() for part in parts]).sum()
            if gradient.count_nonzero() != inside:
                raise TrainkitError(
                    f"{name}: {output_name(path)} at padding is used by the loss, and "
                    f"with tokens= it is 0 where no row of a chunk needs it. Give "
                    f"padding no weight in the loss, or cut by size= alone."
                )
