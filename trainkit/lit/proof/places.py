"""The first module whose output for a row depends on what is beside it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torchmetrics import Metric

from trainkit.core.nested import leaves, tensors
from trainkit.lit.aside import FRAMEWORK

CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4}


@dataclass(frozen=True)
class Event:
    """What went into a module or came out of it.

    Attributes:
        path: the module's.
        is_output: whether it came out.
        values: the tensors, in order.
    """

    path: str
    is_output: bool
    values: tuple[Tensor, ...]


def record_events(module: nn.Module) -> list[Event]:
    """Record what goes into all submodules of a copy, and what comes out, in order."""
    events: list[Event] = []

    def hook(path: str, is_output: bool) -> Any:
        def record(_: Any, args: Any, kwargs: Any, *output: Any) -> None:
            values = output[0] if is_output else (args, list(kwargs.values()))
            found = tuple(each.detach().clone() for each in tensors(values))
            events.append(Event(path, is_output, found))

        return record

    for path, each in module.named_modules():
        if path:
            each.register_forward_pre_hook(hook(path, False), with_kwargs=True)
            each.register_forward_hook(hook(path, True), with_kwargs=True)
    return events


@dataclass(frozen=True)
class Located:
    """The first place at which rows see each other.

    Attributes:
        path: the module's; "" where every module's output agrees.
        is_before: whether the difference arose between the module before and this one.
        of_loss: the innermost module that returns one number, as a loss does.
        after: the module that ran last, where there is no such module.
    """

    path: str
    is_before: bool
    of_loss: str
    after: str


def locate(
    whole: Sequence[Event], part: Sequence[Event], rows: Sequence[int], num_rows: int
) -> Located:
    """Compare the events of a step over all rows with those of a step over some.

    Args:
        whole: the events of all rows.
        part: the events of some.
        rows: the places of these among all.
        num_rows: how many there are in all.
    """
    verdicts = [
        (one.path, one.is_output, _agree(one, other, rows, num_rows))
        for one, other in _paired(whole, part)
    ]
    agreeing = {path for path, is_output, agrees in verdicts if is_output and agrees}
    agreeing -= {path for path, is_output, ok in verdicts if is_output and ok is False}
    for path, is_output, agrees in verdicts:
        if agrees is False and not _is_within(path, agreeing):
            return Located(path, not is_output, "", "")
    return Located("", False, *_last(whole))


def first_that_sees_padding(
    whole: Sequence[Event], part: Sequence[Event], rows: Sequence[int], num_rows: int
) -> str:
    """The first module whose output for a row changes with its padding, where its
    inputs begin alike; "training_step" if none is found."""
    has_agreed = [False, False]
    for one, other in _paired(whole, part):
        for value, cut in zip(one.values, other.values, strict=False):
            if not value.is_floating_point() or value.ndim != cut.ndim or not cut.ndim:
                continue
            if len(value) != num_rows or len(cut) != len(rows):
                continue
            chosen = value[torch.tensor(list(rows), device=value.device)]
            if any(a < b for a, b in zip(chosen.shape, cut.shape, strict=True)):
                continue
            sides = [_narrowed(chosen, cut.shape, at_end=side) for side in (0, 1)]
            same = [alike(each, cut) for each in sides]
            if not any(same) and any(has_agreed):
                return one.path
            has_agreed = [a or b for a, b in zip(has_agreed, same, strict=True)]
    return "training_step"


def _narrowed(value: Tensor, shape: Sequence[int], *, at_end: int) -> Tensor:
    for dim, size in enumerate(shape):
        value = value.narrow(dim, (value.shape[dim] - size) if at_end else 0, size)
    return value


def _paired(whole: Sequence[Event], part: Sequence[Event]) -> list[tuple[Event, Event]]:
    """Events of modules that ran equally often in both."""
    both: dict[tuple[str, bool], list[Event]] = defaultdict(list)
    times: dict[tuple[str, bool], int] = defaultdict(int)
    for event in part:
        both[event.path, event.is_output].append(event)
    for event in whole:
        times[event.path, event.is_output] += 1
    pairs, taken = [], defaultdict(int)
    for event in whole:
        key = event.path, event.is_output
        if times[key] == len(both[key]):
            pairs.append((event, both[key][taken[key]]))
            taken[key] += 1
    return pairs


def _agree(one: Event, other: Event, rows: Sequence[int], num_rows: int) -> bool | None:
    """Whether the rows of both agree; None where they cannot be aligned. Whole numbers,
    such as ids, are not compared."""
    if len(one.values) != len(other.values):
        return None
    found: list[bool] = []
    for whole, part in zip(one.values, other.values, strict=True):
        if whole.ndim == 0 or not whole.dtype.is_floating_point:
            continue
        layouts = _rows_of(whole, part, rows, num_rows)
        if not layouts:
            return None
        found.append(any(alike(aligned, part) for aligned in layouts))
    return all(found)


def _rows_of(
    whole: Tensor, part: Tensor, rows: Sequence[int], num_rows: int
) -> list[Tensor]:
    """The rows of a tensor of all rows that a tensor of some holds. Several entries of
    a row may stand together, or apart, as where two views are concatenated."""
    if whole.shape == part.shape:
        return [whole]  # shared by all rows, such as positions
    if whole.ndim != part.ndim:
        return []
    unlike = [d for d in range(whole.ndim) if whole.shape[d] != part.shape[d]]
    if len(unlike) != 1:
        return []
    (dim,) = unlike
    times = whole.shape[dim] // num_rows
    if times * num_rows != whole.shape[dim] or part.shape[dim] != times * len(rows):
        return []
    before, after = whole.shape[:dim], whole.shape[dim + 1 :]
    at = torch.tensor(list(rows), device=whole.device)
    together = whole.reshape(*before, num_rows, times, *after).index_select(dim, at)
    if times == 1:
        return [together.reshape(part.shape)]
    apart = whole.reshape(*before, times, num_rows, *after).index_select(dim + 1, at)
    return [together.reshape(part.shape), apart.reshape(part.shape)]


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape are equal, up to rounding."""
    close = CLOSE.get(one.dtype, 1e-2)
    one, other = one.double(), other.double()
    finite = torch.isfinite(one) & torch.isfinite(other)
    size = one[finite].abs().max() if finite.any() else torch.tensor(0.0)
    return bool(((one - other)[finite].abs() <= close * (size + 1e-6)).all())


def _is_within(path: str, agreeing: set[str]) -> bool:
    """Whether a module around this one agrees, as where experts sort their tokens."""
    above = path.split(".")
    return any(".".join(above[:number]) in agreeing for number in range(1, len(above)))


def _last(events: Sequence[Event]) -> tuple[str, str]:
    """The innermost module that returns one number; else the one that ran last."""
    for event in events:
        if event.is_output and any(
            value.ndim == 0 and value.is_floating_point() for value in event.values
        ):
            return event.path, ""
    return "", events[-1].path if events else ""


# ---- what moves ----------------------------------------------------------------------


def values_of(module: nn.Module) -> dict[str, Any]:
    """Copies of what a module keeps, by path; of normalisation and metrics nothing."""
    found: dict[str, Any] = {}
    for path, each in module.named_modules():
        if isinstance(each, _NormBase | Metric):
            continue
        own = {n: v for n, v in vars(each).items() if n not in FRAMEWORK}
        held = {**each._parameters, **each._buffers, **own}
        for name, value in held.items():
            for number, leaf in enumerate(leaves(value) if _is_value(value) else ()):
                key = f"{path}.{name}".lstrip("."), number
                if isinstance(leaf, Tensor):
                    found[key[0] + f".{number}" * (number > 0)] = leaf.detach().clone()
                elif isinstance(leaf, int | float | str):
                    found[key[0] + f".{number}" * (number > 0)] = leaf
    return found


def moved(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The names whose values differ, or that are there only once."""
    names = dict.fromkeys([*before, *after])
    missing = object()
    return [
        name
        for name in names
        if not _is_same(before.get(name, missing), after.get(name, missing))
    ]


def _is_value(value: Any) -> bool:
    return isinstance(value, Tensor | int | float | str | list | tuple | dict) and not (
        isinstance(value, bool)
    )


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        is_like = one.shape == other.shape and one.dtype == other.dtype
        return is_like and torch.equal(one.nan_to_num(), other.nan_to_num())
    return type(one) is type(other) and one == other
