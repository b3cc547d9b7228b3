"""Which module is the first whose output for a row changes with the other rows."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.core.batches import tensors

ALIKE = {torch.float64: 1e-9, torch.float32: 1e-4}


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


@contextlib.contextmanager
def recorded(module: nn.Module) -> Iterator[list[Event]]:
    """The events of all passes within, in order."""
    events: list[Event] = []
    handles = []

    def hook(path: str, is_output: bool) -> Any:
        def record(_: Any, args: Any, kwargs: Any, *output: Any) -> None:
            values = output[0] if is_output else (args, list(kwargs.values()))
            found = tuple(each.detach().clone() for each in tensors(values))
            events.append(Event(path, is_output, found))

        return record

    for path, each in module.named_modules():
        if path:
            before, after = hook(path, False), hook(path, True)
            handles += [
                each.register_forward_pre_hook(before, with_kwargs=True),
                each.register_forward_hook(after, with_kwargs=True),
            ]
    try:
        yield events
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Located:
    """The first place at which rows see each other.

    Attributes:
        path: the module's; "" where every module's output agrees.
        is_before: whether the difference arose between the module before and this one.
        of_loss: the innermost module that returns one number, as a loss does.
        after: the module that ran last, where there is no such module.
        unaligned: how many events could not be compared by rows.
        total: how many there were.
    """

    path: str
    is_before: bool
    of_loss: str
    after: str
    unaligned: int
    total: int


def locate(
    whole: Sequence[Event], part: Sequence[Event], rows: Sequence[int], num_rows: int
) -> Located:
    """Compare the events of a pass over all rows with those of a pass over some.

    Args:
        whole: the events of all rows.
        part: the events of some.
        rows: which ones.
        num_rows: how many there are in all.
    """
    pairs = _paired(whole, part)
    verdicts = [(one.path, one.is_output, _agree(one, other, rows, num_rows))
                for one, other in pairs]  # fmt: skip
    unaligned = len(whole) - len(pairs)
    unaligned += sum(agrees is None for _, _, agrees in verdicts)
    agreeing = {path for path, is_output, agrees in verdicts if is_output and agrees}
    agreeing -= {path for path, is_output, ok in verdicts if is_output and ok is False}
    for path, is_output, agrees in verdicts:
        if agrees is not False or _is_within(path, agreeing):
            continue
        return Located(path, not is_output, "", "", unaligned, len(whole))
    return Located("", False, *_last(whole), unaligned, len(whole))


def _paired(whole: Sequence[Event], part: Sequence[Event]) -> list[tuple[Event, Event]]:
    """Events of modules that ran equally often in both."""
    both: dict[tuple[str, bool], list[Event]] = defaultdict(list)
    for event in part:
        both[event.path, event.is_output].append(event)
    times: dict[tuple[str, bool], int] = defaultdict(int)
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
        layouts = rows_of(whole, part, rows, num_rows)
        if not layouts:
            return None
        found.append(any(alike(aligned, part) for aligned in layouts))
    return all(found)


def rows_of(
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
    close = ALIKE.get(one.dtype, 1e-2)
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
