"""Whether a few rows of a call give the same in other chunks and in another order.

Outputs, gradients and statistics are compared. So whatever a forward, or a backward
pass of its own, does with other rows, with their places or with values shows itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.core._compat import Operators, without_hooks
from trainkit.core.generators import States, generator_keeper
from trainkit.core.gradients import HALF
from trainkit.core.inside.cut import renew_list
from trainkit.core.inside.outputs import direction_of
from trainkit.core.inside.rows import Axis, Chunk
from trainkit.core.nested import tensors, with_tensors
from trainkit.core.ranks import Ranks
from trainkit.core.tape.rows import chunk_sizes
from trainkit.errors import TrainkitError

ROUNDING = 10
"""Results may be off by so many square roots of the rounding of the least exact type in
which a call computes."""

DRAWN = 0.4
"""What is drawn while rows are compared: draws would differ between chunks."""


def few_rows(rows: int, size: int) -> int:
    """How many rows are compared: about as many as a chunk has.

    >>> few_rows(64, 8), few_rows(64, 1), few_rows(4, 3), few_rows(2, 1)
    (7, 3, 3, 1)
    """
    return min(max((size - 1) | 1, 5 if size >= 3 else 3), (rows - 1) | 1)


def check(cut: Any, given: Any, size: int) -> None:
    """Refuse a module of which rows give other results in other chunks.

    Rows of both ends are tried: at a kink, rounding makes a large difference.

    Args:
        cut: its `TapedForward`.
        given: the arguments of a call.
        size: of its chunks.
    """
    rows = next(len(x) for x in tensors(given) if x.ndim)
    few, off = few_rows(rows, size), 0.0
    ways = [(range(few), -(-few // 2)), (range(few)[::-1], -(-few // 3))]
    for start in (0, rows - few):
        ends = slice(start, start + few)
        part = with_tensors(given, partial(_part, rows=rows, places=ends))
        try:
            found = [_results(cut, part, *way) for way in ways]
        except TrainkitError:
            raise
        except Exception:  # it mixes float64 with a type of its own, or asks for one
            found = [_results(cut, part, *way, is_wide=False) for way in ways]
        pairs = zip(found[1][0], found[0][0], strict=True)
        off, eps = max(apart(*each) for each in pairs), found[0][1]
        if off <= ROUNDING * eps**0.5:
            return
    first, other = (chunk_sizes(few, most)[0] for _, most in ways)
    raise TrainkitError(
        f"exact BatchNorm: the rows of {cut.name} see each other outside of BatchNorm "
        f"layers, their places count, or Python reads values: {few} rows in chunks of "
        f"{first} give other outputs, gradients or statistics than turned round in "
        f"chunks of {other} (off by {off:.1e}). Do that outside of the module, or give "
        f"a module within to exact BatchNorm."
    )


def _part(whole: Tensor, *, rows: int, places: slice) -> Tensor:
    return whole[places] if whole.ndim and len(whole) == rows else whole


def _results(
    cut: Any,
    given: Any,
    order: Sequence[int],
    size: int,
    *,
    is_wide: bool = True,
) -> tuple[list[list[Tensor | None]], float]:
    """What rows give in some order, as if they were in their own; and the rounding.

    That is their outputs and the buffers. In float64 it is gradients too: in float32
    those of a deep net differ by a hundredth where a rounding moves a kink.

    Args:
        cut: runs the forward.
        given: the arguments.
        order: of the rows; it is its own inverse.
        size: of chunks.
        is_wide: whether all is in float64.
    """
    rows, device = len(order), next(x for x in tensors(given) if x.ndim).device

    def ordered(value: Tensor | None, dim: int = 0) -> Any:
        if value is None or not value.ndim or value.shape[dim] % rows:
            return value
        chunk = Chunk(([*order],), (rows,))
        found = chunk.of(value.detach(), (Axis(dim),))
        return found.requires_grad_(value.requires_grad)

    with (
        _aside(cut.module, device, is_wide=is_wide),
        torch.autocast(device.type, enabled=False)
        if is_wide
        else contextlib.nullcontext(),
        Operators(partial(_operator, device, is_wide=is_wide)),
        without_hooks(),
    ):
        given = with_tensors(given, partial(_copied, is_wide=is_wide))
        given = with_tensors(given, ordered)
        tape, made, _ = cut.record(given, rows, size, Ranks())
        gradients = list[Tensor | None]()
        dims, trains = tape.outputs.values(), tape.differentiable
        outputs = list(map(ordered, made, dims))
        if is_wide and any(trains):
            pairs = zip(outputs, dims, trains, strict=True)
            ways = [
                ordered(direction_of(x, (Axis(0),)), dim) if it else None
                for x, dim, it in pairs
            ]
            with torch.no_grad():
                gradients = tape.backward((), ways)
        of_arguments = map(ordered, gradients[: tape.num_arguments])
        gradients = [*of_arguments, *gradients[tape.num_arguments :]]
        buffers: list[Tensor | None] = [each.clone() for each in cut.module.buffers()]
        rounding = [torch.finfo(x.dtype).eps for x in outputs if x.is_floating_point()]
        return [outputs, gradients, buffers], max([tape.eps(), *rounding])


def _operator(
    device: torch.device,
    operator: Any,
    args: Any,
    kwargs: dict[str, Any],
    *,
    is_wide: bool,
) -> Any:
    """Run an operator; what it draws is one number everywhere, and where all is in
    float64, so is what a forward makes of another type."""
    if is_wide and kwargs.get("dtype") in (torch.float32, *HALF):
        kwargs = {**kwargs, "dtype": torch.float64}
    if torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ()):
        return operator(*args, **kwargs)
    before = States([device], of_host=False)
    if operator is torch.ops.aten.native_dropout.default:
        args = args[0], 0.0, *args[2:]
    found = operator(*args, **kwargs)
    if not before.are(States([device], of_host=False)):
        before.put_back()
        pairs = zip(operator._schema.arguments, args)  # noqa: B905
        written = [x for of, x in pairs if of.alias_info and of.alias_info.is_write]
        for each in tensors([found, written]):
            each.fill_(DRAWN) if each.is_floating_point() else each.zero_()
    return found


@contextlib.contextmanager
def _aside(module: nn.Module, device: torch.device, *, is_wide: bool) -> Iterator[None]:
    """Within it, the module has copies of its tensors. Attributes and random states are
    as before at its end."""
    states, copies = States([device]), dict[int, Tensor]()
    modules = list(module.modules())
    kept: list[tuple[Any, dict[str, Any]]] = [
        (place, dict(place))
        for each in modules
        for place in (each._parameters, each._buffers, vars(each))
    ]
    held = [value for _, values in kept for value in values.values()]
    keepers = [keeper for value in held if (keeper := generator_keeper(value))]
    try:
        for place, values in kept:
            for name, value in values.items():
                if isinstance(value, Tensor):
                    copied = copies.setdefault(id(value), _copied(value, is_wide))
                    place[name] = copied
        for each in modules:
            if isinstance(each, nn.RNNBase):
                each.dropout = 0.0
                renew_list(each)
        yield
    finally:
        states.put_back()
        for place, values in kept:
            place.clear()
            place.update(values)
        for keeper in keepers:
            keeper()


def _copied(value: Tensor, is_wide: bool) -> Tensor:
    found = value.detach().clone()
    found = found.double() if is_wide and found.is_floating_point() else found
    if isinstance(value, nn.Parameter):
        return nn.Parameter(found, requires_grad=value.requires_grad)
    return found.requires_grad_(value.requires_grad)


def apart(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> float:
    """How far tensors are from others, as a share of their size; None is 0."""
    if len(found) != len(wanted):
        return torch.inf
    squares, sizes, wide = 0.0, 0.0, torch.complex128
    for one, other in zip(found, wanted, strict=True):
        if one is not None and other is not None and one.shape != other.shape:
            return torch.inf
        first, second = (
            torch.zeros(()) if x is None else torch.nan_to_num(x.detach().to(wide))
            for x in (one, other)
        )
        squares += float((first - second).abs().square().sum())
        sizes += float(second.abs().square().sum())
    return (squares / sizes) ** 0.5 if sizes else squares and torch.inf
