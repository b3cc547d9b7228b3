"""What is padding in a module's outputs, and whether a loss uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.core.inside.chunks import Chunk
from trainkit.core.inside.draws import are_same, torch_states
from trainkit.core.inside.rows import Joint, Plan, Unfit, are_close, output_name
from trainkit.core.nested import take_apart
from trainkit.core.out_of_memory import is_out_of_memory
from trainkit.core.split.partition import Span
from trainkit.errors import TrainkitError

Columns = tuple[int, ...]
"""The dimensions of an argument that have columns."""

FEW = 5
"""With more arguments of the padded length, one, all, or all but one are tried."""


def with_columns(values: Sequence[Any], plan: Plan, width: int) -> tuple[Columns, ...]:
    """The dimensions of each argument that have the padded length."""
    return tuple(
        tuple(
            dim
            for dim in range(1 if multiple else 0, value.ndim)
            if value.shape[dim] == width
        )
        if isinstance(value, Tensor)
        and not value.is_nested
        and value.layout is torch.strided
        else ()
        for value, multiple in zip(values, plan.multiples, strict=True)
    )


def ways_to_trim(
    found: Sequence[Columns], mask: int | None
) -> Iterator[tuple[Columns, ...]]:
    """Choices of arguments whose columns are left out: the fewest that will do first.

    An argument may have the padded length by chance: the features of a row, or a
    decoder's tokens. It is no part of what must be cut for the mask to fit.

    Args:
        found: the dimensions of each argument that have the padded length.
        mask: the argument that is the mask, which is part of each choice.
    """
    others = [i for i, dims in enumerate(found) if dims and i != mask]
    numbers = range(min(1, len(others)), len(others) + 1)
    if len(others) > FEW:
        numbers = (1, len(others), len(others) - 1)
    for number in numbers:
        for chosen in combinations(others, number):
            # A square is cut on both sides; else one side has the length by chance.
            sides = [dict.fromkeys((found[i], found[i][:1])) for i in chosen]
            for dims in product(*sides):
                way = dict(zip(chosen, dims, strict=True))
                if mask is not None:
                    way[mask] = found[mask]
                yield tuple(way.get(i, ()) for i in range(len(found)))


def padded_plan(
    plan: Plan,
    ways: Iterable[tuple[Columns, ...]],
    run: Callable[[list[Any]], Any],
    values: Sequence[Any],
    sample: tuple[Chunk, Sequence[Span]],
    modes: Sequence[tuple[nn.Module, bool]],
) -> Plan:
    """Find arguments and outputs that have columns, where no row looks at padding.

    Args:
        plan: which knows the rows.
        ways: choices of columns of arguments; the first that fits is taken.
        run: runs the module on other arguments, with the same draws each time.
        values: the arguments.
        sample: a chunk that leaves out columns, and the columns of its rows.
        modes: of the module and its parts; put into evaluation mode if they draw.
    """
    chunk, spans = sample
    devices = {value.device for value in values if isinstance(value, Tensor)}

    def outputs(columns: Sequence[Columns]) -> list[Any]:
        part, each = chunk, zip(values, plan.multiples, columns, strict=True)
        given = [part.part(v, 0, m, c) if m or c else v for v, m, c in each]
        return [field.value for field in take_apart(run(given))[0]]

    before = torch_states(devices)
    whole = outputs(plan.columns)
    if not are_same(before, torch_states(devices)):
        for each, _ in modes:
            each.training = False  # other columns would have other draws
        whole = outputs(plan.columns)
    failed: Exception | None = None
    for way in ways:
        try:
            pairs = zip(plan.joints, plan.paths, whole, outputs(way), strict=True)
            joints = tuple(_joint(*each, chunk, spans) for each in pairs)
            return replace(plan, trimmed=way, joints=joints)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            failed = error
    if isinstance(failed, Unfit):
        raise failed
    raise Unfit(
        f"it does not run without columns that are padding: "
        f"{type(failed).__name__}: {failed}"
    ) from failed


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
    """Looks in each backward pass whether the loss used padding.

    A CUDA device is waited for in passes 1, 2, 4, 8, ... What the others found is read
    in the next call, which waits for the device anyway, or at the end.
    """

    def __init__(self) -> None:
        self._num_passes = 0
        self._unread: list[tuple[Tensor, str]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return PaddingCheck, ()  # a copy begins anew

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
        waits = not self._num_passes & (self._num_passes - 1)
        for gradient, joint, path in zip(
            gradients, plan.joints, plan.paths, strict=True
        ):
            if gradient is None or joint.dim is None or joint.padded is None:
                continue
            used = [
                part.any()
                for chunk in chunks
                for part in _left_out(gradient, joint, chunk)
            ]
            if used:
                waits = waits or not runs_later(gradient)
                name_of = f"{name}: {output_name(path)}"
                self._unread.append((torch.stack(used).any(), name_of))
        if waits:
            self.read()

    def read(self) -> None:
        """Refuse what was found and not read yet."""
        unread, self._unread = self._unread, []
        for is_used, name in unread:
            if is_used:
                raise TrainkitError(
                    f"{name} at padding is used by the loss, and with tokens= it is 0 "
                    f"where no row of a chunk needs it. Give padding no weight in the "
                    f"loss (a mask marks tokens by 1 or True), or cut by size= alone."
                )


def runs_later(tensor: Tensor) -> bool:
    """Whether what is computed from it is read only by waiting for a device."""
    return tensor.is_cuda


def _left_out(gradient: Tensor, joint: Joint, chunk: Chunk) -> list[Tensor]:
    """The parts of a chunk's rows that are before its columns, and behind them."""
    assert joint.dim is not None
    assert joint.padded is not None
    rows = chunk.part(gradient, joint.dim, joint.multiple)
    width = rows.shape[joint.padded]
    first, behind = chunk.columns or (0, width)
    spans = [(0, first), (behind, width)]
    return [
        rows.narrow(joint.padded, one, other - one)
        for one, other in spans
        if one < other
    ]
