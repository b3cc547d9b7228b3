"""Which arguments of a module have rows, and how its outputs are joined.

Lengths in one call do not tell: a table of 64 entries is no argument of 64 rows. So the
module runs on a few rows, once more with some of them overwritten, and once on fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainkit.core.out_of_memory import is_out_of_memory
from trainkit.core.split.fields import Field, take_apart
from trainkit.errors import TrainkitError

MOST_PROBED = 4
"""The rows of a probe: two that stay, and two that are overwritten."""

ROUNDING = 64
"""Rows that do not see each other may differ by so many units in the last place."""


@dataclass(frozen=True)
class Joint:
    """How the chunks' values of one output become one value.

    Attributes:
        dim: the dimension that holds the rows; None for a value that has none, which is
            the same for all rows.
        multiple: how many entries of it belong to a row.
        padded: the dimension of columns that chunks leave out.
    """

    dim: int | None
    multiple: int = 0
    padded: int | None = None


@dataclass(frozen=True)
class Plan:
    """How one kind of call is cut.

    Attributes:
        multiples: how many entries of each argument belong to a row; 0 for one that
            every chunk gets whole.
        joints: for each output.
        paths: of the outputs, for messages.
        trimmed: whether dimension 1 of each argument has columns that chunks leave out.
    """

    multiples: tuple[int, ...]
    joints: tuple[Joint, ...]
    paths: tuple[str, ...]
    trimmed: tuple[bool, ...] = ()

    @property
    def columns(self) -> list[int | None]:
        """The dimension of each argument's columns; None if it has none to cut."""
        return [1 if each else None for each in self.trimmed] or [None] * len(
            self.multiples
        )


class Unfit(TrainkitError):
    """A way to cut the arguments under which the rows do not stand alone."""


def num_rows(values: Sequence[Any], shared: Collection[int]) -> int:
    """The leading length of the first tensor that has one above 1; else 1."""
    for index, value in enumerate(values):
        if isinstance(value, Tensor) and value.ndim and index not in shared:
            if value.is_nested or value.layout is not torch.strided:
                continue
            if value.shape[0] != 1:
                return value.shape[0]
    return 1


def multiples_of(
    values: Sequence[Any], rows: int, shared: Collection[int]
) -> list[int]:
    """How many entries each value has for each row; 0 if it cannot have rows."""
    return [
        value.shape[0] // rows
        if isinstance(value, Tensor)
        and value.ndim
        and value.layout is torch.strided
        and index not in shared
        and value.shape[0]
        and value.shape[0] % rows == 0
        else 0
        for index, value in enumerate(values)
    ]


def settle(
    run: Callable[[list[Any]], Any],
    values: Sequence[Any],
    rows: int,
    shared: Collection[int],
    has_drawn: Callable[[], bool],
) -> Plan:
    """Find which arguments have rows, so that no row's output depends on another row.

    Args:
        run: runs the module on other arguments in place of `values`, with the same
            draws each time.
        values: the arguments.
        rows: how many rows they have.
        shared: the indices of arguments that every chunk gets whole.
        has_drawn: whether the last run has drawn random numbers. If not, a row's output
            must not depend on how many rows there are either.

    Raises:
        Unfit: rows see each other, or an output cannot be joined.
    """
    first: Exception | None = None
    for multiples in _guesses(multiples_of(values, rows, shared)):
        try:
            return _plan(run, values, rows, multiples, has_drawn)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            first = first or error
    assert first is not None
    if isinstance(first, Unfit):
        raise first
    raise Unfit(
        f"it does not run on {min(MOST_PROBED, rows)} of its {rows} rows: "
        f"{type(first).__name__}: {first}"
    ) from first


def _guesses(multiples: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Ways to take the arguments, the likeliest first."""
    plain = tuple(each * (each == 1) for each in multiples)
    tried = [plain, tuple(multiples)]
    with_rows = [index for index, each in enumerate(multiples) if each]
    for index in with_rows[1:]:
        other = multiples[index] - plain[index]
        tried.append((*plain[:index], other, *plain[index + 1 :]))
    tried.append(tuple(each * (i == with_rows[0]) for i, each in enumerate(plain)))
    yield from dict.fromkeys(tried)


def taken(value: Tensor, rows: Sequence[int], multiple: int, of: int) -> Tensor:
    """Some rows of a tensor, with all entries that belong to them."""
    index = torch.as_tensor(rows, device=value.device)
    return value.unflatten(0, (of, multiple)).index_select(0, index).flatten(0, 1)


def _plan(
    run: Callable[[list[Any]], Any],
    values: Sequence[Any],
    rows: int,
    multiples: tuple[int, ...],
    has_drawn: Callable[[], bool],
) -> Plan:
    picked = sorted({0, 1, rows - 2, rows - 1} & set(range(rows)))
    num = len(picked)
    kept = num // 2

    def outputs(chosen: Sequence[int]) -> list[Field]:
        pairs = zip(values, multiples, strict=True)
        given = [taken(x, chosen, m, rows) if m else x for x, m in pairs]
        return take_apart(run(given))[0]

    first = outputs(picked)
    overwritten = outputs([*picked[:kept], *[picked[0]] * (num - kept)])
    fewer = outputs(picked[:0:-1])
    is_quiet = not has_drawn()
    if not len(first) == len(overwritten) == len(fewer):
        raise Unfit("the number of its outputs depends on the rows")
    joints = tuple(
        _joint(a, b.value, c.value, num, kept, is_quiet)
        for a, b, c in zip(first, overwritten, fewer, strict=True)
    )
    if all(joint.dim is None for joint in joints):
        raise Unfit("it returns nothing that has rows")
    return Plan(multiples, joints, tuple(field.path for field in first))


def _joint(
    field: Field, overwritten: Any, fewer: Any, num: int, kept: int, is_quiet: bool
) -> Joint:
    value, name = field.value, output_name(field.path)
    if not isinstance(value, Tensor):
        if not _same_object(value, fewer):
            raise Unfit(
                f"{name} is a {type(value).__name__}, which cannot be joined from "
                f"those of chunks"
            )
        return Joint(None)
    if not isinstance(fewer, Tensor) or fewer.ndim != value.ndim:
        raise Unfit(f"the shape of {name} depends on the rows")
    dims = [d for d in range(value.ndim) if value.shape[d] != fewer.shape[d]]
    if not dims:
        if not (are_close(value, fewer) and are_close(value, overwritten)):
            raise Unfit(
                f"{name}, of shape {list(value.shape)}, has no rows, and depends on "
                f"them"
            )
        return Joint(None)
    dim = dims[0]
    has_rows = value.shape[dim] * (num - 1) == fewer.shape[dim] * num
    if len(dims) > 1 or not has_rows or overwritten.shape != value.shape:
        raise Unfit(
            f"the size of {name} does not follow the number of rows: "
            f"{list(value.shape)} for {num} rows, {list(fewer.shape)} for {num - 1}"
        )
    multiple = value.shape[dim] // num
    own = value.narrow(dim, 0, kept * multiple)
    if not are_close(own, overwritten.narrow(dim, 0, kept * multiple)):
        raise Unfit(f"{name} of a row depends on other rows")
    last = value.narrow(dim, (num - 1) * multiple, multiple)
    moved = fewer.narrow(dim, 0, multiple)
    if is_quiet and not are_close(last, moved, rounding=16 * ROUNDING):
        raise Unfit(f"{name} of a row depends on the number of rows, or on its place")
    return Joint(dim, multiple)


def output_name(path: str) -> str:
    """An output's name for messages."""
    return f"its output {path!r}" if path else "its output"


def _same_object(value: Any, other: Any) -> bool:
    if value is other:
        return True
    try:
        return type(value) is type(other) and bool(value == other)
    except Exception:
        return False


def are_close(value: Tensor, other: Tensor, *, rounding: float = ROUNDING) -> bool:
    """Whether two tensors differ by no more than rounding; waits for the device.

    Args:
        value: a tensor.
        other: another of its shape.
        rounding: how many units in the last place of the largest entry are allowed.
    """
    if value.shape != other.shape:
        return False
    if not (value.is_floating_point() or value.is_complex()) or not value.numel():
        return torch.equal(value, other)
    one, two = (torch.nan_to_num(each.detach()) for each in (value, other))
    wide = torch.promote_types(one.dtype, torch.float32)
    most = rounding * torch.finfo(value.dtype).eps * one.abs().max().to(wide)
    return bool((one - two).abs().max().to(wide) <= most)
