"""Which arguments of a module have rows, and how its outputs are joined.

Lengths in one call do not tell: a table of 64 entries is no argument of 64 rows. So the
module runs on a few rows, then with all but one of them overwritten, with the rows in
another order, and on fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from trainkit.core.gradients import HALF
from trainkit.core.nested import Field
from trainkit.core.out_of_memory import is_out_of_memory, release
from trainkit.errors import TrainkitError

ROUNDING, HALF_ROUNDING = 64, 4
"""Runs on the same rows may differ by so many units in the last place of the largest
entry; by fewer in half precision, in which a layer rounds only what it returns."""

OUTLIER = 1e6
"""Entries of this size, such as those of a mask, do not say what rounding is, where a
tenth of all is far smaller."""

OTHER_NUMBER = 16
"""Another number of rows may be computed in another order: so many times more."""


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
        trimmed: the dimensions of each argument whose columns chunks leave out.
    """

    multiples: tuple[int, ...]
    joints: tuple[Joint, ...]
    paths: tuple[str, ...]
    trimmed: tuple[tuple[int, ...], ...] = ()

    @property
    def columns(self) -> Sequence[tuple[int, ...]]:
        """The dimensions of each argument's columns; none if it has none to cut."""
        return self.trimmed or [()] * len(self.multiples)


class Unfit(TrainkitError):
    """A way to cut the arguments under which the rows do not stand alone."""


def num_rows(
    values: Sequence[Any],
    paths: Sequence[str],
    shared: Collection[int],
    known: Collection[str],
) -> int:
    """The leading length of an argument that is known to have rows; else of the first
    tensor that has a length other than 1; else 1.

    Args:
        values: the arguments.
        paths: of the arguments.
        shared: the indices of arguments that every chunk gets whole.
        known: the paths of arguments that had rows in other calls.
    """
    tensors = [
        (path in known, value.shape[0])
        for index, (path, value) in enumerate(zip(paths, values, strict=True))
        if isinstance(value, Tensor)
        and not value.is_nested
        and value.layout is torch.strided
        and value.ndim
        and index not in shared
    ]
    sure = [length for is_known, length in tensors if is_known]
    lengths = sure or [length for _, length in tensors]
    return next((each for each in lengths if each != 1), 1)


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


class Trial(Protocol):
    """Runs the module on other arguments, always with the same draws."""

    def __call__(
        self, given: list[Any], *, rows_with_graph: int = 0, evaluates: bool = False
    ) -> list[Field]: ...

    @property
    def has_drawn(self) -> bool: ...


def settle(
    trial: Trial,
    values: Sequence[Any],
    rows: int,
    shared: Collection[int],
    *,
    most: int | None,
) -> Plan:
    """Find which arguments have rows, so that no row's output depends on another row.

    Args:
        trial: runs the module on other arguments in place of `values`.
        values: the arguments.
        rows: how many rows they have.
        shared: the indices of arguments that every chunk gets whole.
        most: the most rows of a chunk; None for all.

    Raises:
        Unfit: rows see each other, or an output cannot be joined.
    """
    picked = sorted({0, 1, rows - 2, rows - 1} & set(range(rows)))
    with_graph = picked[: min(2, most or 2)]
    first: Exception | None = None
    for multiples in _guesses(multiples_of(values, rows, shared)):
        try:
            try:
                return _plan(trial, values, rows, multiples, picked, with_graph)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                release(error)
            return _plan(trial, values, rows, multiples, [0, rows - 1], [0])
        except Exception as error:
            if is_out_of_memory(error):
                if first is None:
                    raise
                break
            first = first or error
    assert first is not None
    if isinstance(first, Unfit):
        raise first
    raise Unfit(
        f"it does not run on {len(picked)} of its {rows} rows: "
        f"{type(first).__name__}: {first}"
    ) from first


def _guesses(multiples: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Ways to take the arguments, the likeliest first."""
    plain = tuple(each * (each == 1) for each in multiples)
    tried = [plain, tuple(multiples)]
    with_rows = [index for index, each in enumerate(multiples) if each]
    for index in (*with_rows[1:], *with_rows[:1]):
        other = multiples[index] - plain[index]
        tried.append((*plain[:index], other, *plain[index + 1 :]))
    tried.append(tuple(each * (i == with_rows[0]) for i, each in enumerate(plain)))
    yield from (each for each in dict.fromkeys(tried) if any(each))


def taken(value: Tensor, rows: Sequence[int], multiple: int, of: int) -> Tensor:
    """Some rows of a tensor, with all entries that belong to them; no part of a graph,
    since checkpoints around count what that saves."""
    index = torch.as_tensor(rows, device=value.device)
    entries = value.detach().unflatten(0, (of, multiple))
    return entries.index_select(0, index).flatten(0, 1)


def _plan(
    trial: Trial,
    values: Sequence[Any],
    rows: int,
    multiples: tuple[int, ...],
    picked: list[int],
    with_graph: list[int],
) -> Plan:
    num = len(picked)

    def outputs(chosen: Sequence[int], **options: Any) -> list[Field]:
        pairs = zip(values, multiples, strict=True)
        given = [taken(x, chosen, m, rows) if m else x for x, m in pairs]
        return trial(given, **options)

    outputs(
        with_graph, rows_with_graph=len(with_graph)
    )  # first, or a cache is made without a graph
    first = outputs(picked)
    has_drawn = trial.has_drawn
    turned = outputs(picked[::-1])
    # A row in the middle alone stays: rows before it and behind it must not matter.
    middle = {row: outputs([picked[row]] * num) for row in (num // 2 - 1, num // 2)}
    fewer = outputs(picked[1:])
    outputs(with_graph, rows_with_graph=len(with_graph))
    runs = [turned, fewer, *middle.values()]
    if any(len(run) != len(first) for run in runs):
        raise Unfit("the number of its outputs depends on the rows")
    joints = []
    for index, field in enumerate(first):
        joint = _joint(field, [run[index].value for run in runs], num)
        joints.append(joint)
        for row, run in middle.items():
            if not _is_same_row(joint, field.value, run[index].value, row):
                raise Unfit(f"{output_name(field.path)} of a row depends on other rows")
    if all(joint.dim is None for joint in joints):
        raise Unfit("it returns nothing that has rows")
    if has_drawn:  # a place has its own draws, but for evaluation
        first, turned, fewer = _evaluated(trial, outputs, picked) or ([], [], [])
    for joint, field, other, less in zip(joints, first, turned, fewer, strict=False):
        _refuse_places(joint, field, other.value, less.value, num)
    return Plan(multiples, tuple(joints), tuple(field.path for field in first))


def _refuse_places(
    joint: Joint, field: Field, turned: Any, fewer: Any, num: int
) -> None:
    name = output_name(field.path)
    if not _is_turned(joint, field.value, turned, num):
        raise Unfit(f"{name} of a row depends on the row's place in the batch")
    if not _is_shifted(joint, field.value, fewer, num):
        raise Unfit(f"{name} of a row depends on the number of rows")


def _evaluated(
    trial: Trial, outputs: Callable[..., list[Field]], picked: list[int]
) -> list[list[Field]] | None:
    """The outputs for these rows, for them turned round, and without the first of them,
    in evaluation mode; None if that mode does not run, or draws as well."""
    try:
        found = [
            outputs(chosen, evaluates=True)
            for chosen in (picked, picked[::-1], picked[1:])
        ]
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return None
    return None if trial.has_drawn else found


def _joint(field: Field, others: Sequence[Any], num: int) -> Joint:
    """How an output is joined.

    Args:
        field: the output for `num` rows.
        others: the same output for as many other rows, for one row less, and so on.
        num: of rows.
    """
    value, fewer, name = field.value, others[1], output_name(field.path)
    if not isinstance(value, Tensor):
        if not all(are_equal(value, other) for other in others):
            refuse_kind(field.path, value)
        return Joint(None)
    if any(not isinstance(x, Tensor) or x.ndim != value.ndim for x in others):
        raise Unfit(f"the shape of {name} depends on the rows")
    if value.is_nested or value.layout is not torch.strided:
        raise Unfit(f"{name} is no dense tensor")
    dims = [d for d in range(value.ndim) if value.shape[d] != fewer.shape[d]]
    if not dims:
        if not all(are_close(value, other) for other in others):
            raise Unfit(
                f"{name}, of shape {list(value.shape)}, has no rows, and depends on "
                f"them"
            )
        return Joint(None)
    dim = dims[0]
    has_rows = value.shape[dim] * (num - 1) == fewer.shape[dim] * num
    if len(dims) > 1 or not has_rows:
        raise Unfit(
            f"the size of {name} does not follow the number of rows: "
            f"{list(value.shape)} for {num} rows, {list(fewer.shape)} for {num - 1}"
        )
    if any(each.shape != value.shape for each in (others[0], *others[2:])):
        raise Unfit(f"the shape of {name} depends on the rows")
    return Joint(dim, value.shape[dim] // num)


def _is_same_row(joint: Joint, value: Any, other: Any, row: int) -> bool:
    if joint.dim is None:
        return True
    start = row * joint.multiple
    one, two = (x.narrow(joint.dim, start, joint.multiple) for x in (value, other))
    return are_close(one, two, scale=value)


def _is_turned(joint: Joint, value: Any, other: Any, num: int) -> bool:
    if joint.dim is None or not isinstance(value, Tensor):
        return True
    if value.ndim <= joint.dim or value.shape[joint.dim] != num * joint.multiple:
        return True  # another output than in training
    rows = other.unflatten(joint.dim, (num, joint.multiple)).flip(joint.dim)
    return are_close(value, rows.flatten(joint.dim, joint.dim + 1))


def _is_shifted(joint: Joint, value: Any, fewer: Any, num: int) -> bool:
    """Whether outputs for all rows but the first are those that all rows give them."""
    if joint.dim is None or not isinstance(value, Tensor):
        return True
    if value.ndim <= joint.dim or value.shape[joint.dim] != num * joint.multiple:
        return True  # another output than in training
    rest = value.narrow(joint.dim, joint.multiple, (num - 1) * joint.multiple)
    return are_close(rest, fewer, times=OTHER_NUMBER)


def refuse_kind(path: str, value: Any) -> None:
    """Raise an error for an output that is no tensor, and not the same for all rows."""
    raise Unfit(
        f"{output_name(path)} is a {type(value).__name__}, which cannot be joined from "
        f"those of chunks"
    )


def output_name(path: str) -> str:
    """An output's name for messages."""
    return f"its output {path!r}" if path else "its output"


def are_equal(value: Any, other: Any) -> bool:
    """Whether two outputs that are no tensors are the same."""
    if value is other:
        return True
    try:
        return type(value) is type(other) and bool(value == other)
    except Exception:
        return False


def are_close(
    value: Tensor, other: Tensor, *, scale: Tensor | None = None, times: float = 1
) -> bool:
    """Whether two tensors differ by no more than rounding; waits for the device.

    Args:
        value: a tensor.
        other: another.
        scale: whose largest entry, but for those of a mask, says what rounding is;
            default: `value`.
        times: allows so many times more.
    """
    if value.shape != other.shape or value.dtype != other.dtype:
        return False
    return not differ(value, other, scale=scale, times=times)


def differ(
    value: Tensor, other: Tensor, *, scale: Tensor | None = None, times: float = 1
) -> Tensor:
    """Whether two tensors of one shape differ by more than rounding; does not wait.

    Args:
        value: a tensor.
        other: another.
        scale: as of `are_close`.
        times: as of `are_close`.
    """
    if not (value.is_floating_point() or value.is_complex()) or not value.numel():
        return (value != other).any()
    wide = torch.promote_types(value.dtype, torch.float32)
    one, two, most = (
        torch.nan_to_num(x.detach().to(wide))
        for x in (value, other, value if scale is None else scale)
    )
    found, sizes = torch.finfo(value.dtype), most.abs()
    small = sizes.flatten().kthvalue(sizes.numel() // 10 + 1).values
    limit = (1e4 * small).clamp_min(min(OUTLIER, found.max / 9))
    usual = sizes.where(sizes < limit, 0).max()
    usual = usual.where(usual > 0, sizes.max())
    units = (HALF_ROUNDING if value.dtype in HALF else ROUNDING) * times
    return ((one - two).abs() > one.abs().maximum(usual) * units * found.eps).any()
