"""Where rows first see each other or their padding, and what a micro-batch moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torchmetrics import Metric

from trainkit.core.nested import tensors
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


def first_unlike(
    whole: Sequence[Event], part: Sequence[Event], rows: Sequence[int], num_rows: int
) -> Event | None:
    """The first event in which rows are not what they are in another step.

    Args:
        whole: the events of a step over all rows.
        part: those of a step over some of them; or over all, with less padding.
        rows: the places of these among all.
        num_rows: how many there are in all.
    """
    others = _numbered(part)
    verdicts = [
        (event, _agrees(event, others[key], rows, num_rows))
        for key, event in _numbered(whole).items()
        if key in others
    ]
    outputs = [(event.path, ok) for event, ok in verdicts if event.is_output]
    agreeing = {path for path, ok in outputs if ok}
    agreeing -= {path for path, ok in outputs if ok is False}
    for event, ok in verdicts:
        if ok is False and not _is_within(event.path, agreeing):
            return event
    return None


def _numbered(events: Sequence[Event]) -> dict[tuple[Any, ...], Event]:
    """Events by their module, by whether they came out, by how often it runs in all,
    and by how often it has run."""
    totals = Counter((each.path, each.is_output) for each in events)
    times: Counter[tuple[str, bool]] = Counter()
    found = {}
    for each in events:
        key = each.path, each.is_output
        times[key] += 1
        found[(*key, totals[key], times[key])] = each
    return found


def _agrees(
    one: Event, other: Event, rows: Sequence[int], num_rows: int
) -> bool | None:
    """Whether the rows of both agree; None where they cannot be aligned. Whole numbers,
    such as ids, are not compared."""
    if len(one.values) != len(other.values):
        return None
    found: list[bool] = []
    for whole, part in zip(one.values, other.values, strict=True):
        if whole.ndim == 0 or not whole.dtype.is_floating_point:
            continue
        views = _views(whole, part, rows, num_rows)
        if not views:
            return None
        found.append(any(alike(each, part) for each in views))
    return all(found)


def _views(
    whole: Tensor, part: Tensor, rows: Sequence[int], num_rows: int
) -> list[Tensor]:
    """What a tensor of all rows may hold of a tensor of some, or of narrower ones."""
    if whole.shape == part.shape:
        return [whole]  # shared by all rows, such as positions
    if whole.ndim != part.ndim:
        return []
    unlike = [d for d in range(whole.ndim) if whole.shape[d] != part.shape[d]]
    if len(rows) == num_rows:
        return _narrowed(whole, part, unlike)
    return _chosen(whole, part, unlike[0], rows, num_rows) if len(unlike) == 1 else []


def _narrowed(whole: Tensor, part: Tensor, dims: list[int]) -> list[Tensor]:
    """The tensor without padding at its end, and without padding at its beginning."""
    if 0 in dims or any(whole.shape[dim] < part.shape[dim] for dim in dims):
        return []
    found = [whole, whole]
    for dim in dims:
        size = part.shape[dim]
        starts = 0, whole.shape[dim] - size
        found = [v.narrow(dim, at, size) for v, at in zip(found, starts, strict=True)]
    return found


def _chosen(
    whole: Tensor, part: Tensor, dim: int, rows: Sequence[int], num_rows: int
) -> list[Tensor]:
    """Some rows of a tensor. Several entries of a row may stand together, or apart, as
    where two views are concatenated."""
    times, rest = divmod(whole.shape[dim], num_rows)
    if rest or part.shape[dim] != times * len(rows):
        return []
    places = torch.arange(num_rows * times)
    together = places.view(num_rows, times)[list(rows)]
    apart = places.view(times, num_rows)[:, list(rows)]
    orders = [each.flatten().to(whole.device) for each in (together, apart)]
    return [whole.index_select(dim, each) for each in orders]


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


# ---- what moves ----------------------------------------------------------------------


def values_of(module: nn.Module) -> dict[str, Tensor]:
    """Copies of a module's state, and of the tensors and numbers that are attributes of
    it, by path; of normalisation and metrics nothing."""
    found: dict[str, Tensor] = {}
    for path, each in module.named_modules():
        if isinstance(each, _NormBase | Metric):
            continue
        for name, value in {**each._parameters, **each._buffers, **vars(each)}.items():
            if type(value) in (int, float):
                value = torch.tensor(value, dtype=torch.float64)
            if isinstance(value, Tensor) and name not in FRAMEWORK:
                found[f"{path}.{name}".lstrip(".")] = value.detach().clone()
    return found


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> list[str]:
    """The names whose values differ, or that are there only once."""
    same = [
        name
        for name in before.keys() & after.keys()
        if torch.equal(before[name].nan_to_num(), after[name].nan_to_num())
    ]
    return [name for name in {**before, **after} if name not in same]
