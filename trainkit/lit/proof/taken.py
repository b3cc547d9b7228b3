"""What is taken of a rehearsal: gradients, what modules see, and what has moved."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torchmetrics import Metric

from trainkit.core.nested import tensors
from trainkit.lit.aside import FRAMEWORK
from trainkit.lit.proof.draws import Draws, alike

Key = tuple[int, int, str]

MOST_COORDINATES = 200_000


@dataclass
class Taken:
    """What a rehearsal has found.

    Attributes:
        draws: of random numbers.
        gradients: by the optimizer's number, the number of its step, and the name of
            the parameter.
        num_calls: how often optimizers stepped.
        result: what the rehearsal's last change has returned.
        losses: before each backward pass.
    """

    draws: Draws
    gradients: dict[Key, Tensor] = field(default_factory=dict)
    num_calls: int = 0
    result: Any = None
    losses: list[float] = field(default_factory=list)

    @property
    def size(self) -> float:
        """The norm of all gradients."""
        return math.hypot(*map(_norm, self.gradients.values()))

    def vector(self, sizes: dict[Key, int]) -> Tensor:
        """Some coordinates of gradients, of which each has so many; always the same."""
        step = 1 + 2 * (sum(sizes.values()) // (2 * MOST_COORDINATES))
        return torch.cat(
            [
                self.gradients[key].flatten()[::step].double().cpu()
                if key in self.gradients
                else torch.zeros(len(range(0, size, step)), dtype=torch.float64)
                for key, size in sizes.items()
            ]
        )

    def off_from(self, whole: Taken) -> float:
        """How far these gradients are from others, as a share of their size."""
        size, off = whole.size, math.hypot(*whole.apart(self).values())
        return off / size if size else float(off > 0)

    def is_surely(self, whole: Taken, rounding: float) -> bool:
        """Whether these gradients are another's but for rounding, in sum and in each
        parameter that is not tiny beside all others."""
        told = {k: o for k, o in self.apart(whole).items() if o > 1e-7 * whole.size}
        of = whole.gradients
        are_alike = all(k in of and o < 1e-3 * _norm(of[k]) for k, o in told.items())
        return are_alike and self.off_from(whole) <= rounding

    def apart(self, other: Taken) -> dict[Key, float]:
        """How far another's gradients are from these, one by one."""
        found = {}
        for key in {**self.gradients, **other.gradients}:
            held = [t.gradients[key] for t in (self, other) if key in t.gradients]
            found[key] = _norm(held[0] - held[1] if len(held) > 1 else held[0])
        return found


def combined(taken: Sequence[Taken], weights: Sequence[float]) -> Taken:
    """The weighted sum of several rehearsals."""
    found = Taken(taken[0].draws, num_calls=taken[0].num_calls)
    for each, weight in zip(taken, weights, strict=True):
        for key, gradient in each.gradients.items():
            found.gradients[key] = found.gradients.get(key, 0.0) + gradient * weight
    return found


@dataclass(frozen=True)
class Alone:
    """The gradients of some rows: as one batch, and of each of their parts by itself.

    Attributes:
        sizes: how many numbers each gradient has.
        whole: some coordinates of the gradient of all rows, always the same ones.
        parts: these of the parts' gradients, one row for each part.
        loss: of all rows.
        losses: of the parts.
    """

    sizes: dict[Key, int]
    whole: Tensor
    parts: Tensor
    loss: float
    losses: Tensor

    @classmethod
    def of(cls, whole: Taken, parts: Sequence[Taken]) -> Alone:
        """What was taken of all rows, and of each part."""
        sizes = {key: each.numel() for key, each in whole.gradients.items()}
        gradients = torch.stack([each.vector(sizes) for each in parts])
        losses = torch.tensor([sum(each.losses) for each in parts], dtype=torch.float64)
        return cls(sizes, whole.vector(sizes), gradients, sum(whole.losses), losses)

    def off(self, weights: Tensor, whole: Tensor | None = None) -> float:
        """How far the weighted parts are from the whole, as a share of its size."""
        whole = self.whole if whole is None else whole
        size = float(torch.linalg.vector_norm(whole))
        apart = float(torch.linalg.vector_norm(whole - weights @ self.parts))
        return apart / size if size else float(apart > 0)

    def best(self) -> Tensor:
        """The weights with which the parts are nearest to the whole. They add up to
        one."""
        size = torch.linalg.vector_norm(self.whole).expand(len(self.parts) + 1, 1)
        inner = torch.cat([self.parts, size[1:]], 1)
        target = torch.cat([self.whole, size[0]])
        found = torch.linalg.lstsq(inner.T, target[:, None], driver="gelsd")
        return found.solution[:, 0]

    def least_off(self) -> float:
        """How far the parts are from the whole, with the best weights or as a sum."""
        ones = torch.ones(len(self.parts), dtype=torch.float64)
        return min(self.off(self.best()), self.off(ones))


def _norm(tensor: Any) -> float:
    return float(torch.linalg.vector_norm(tensor).double())


# ---- what modules see ----------------------------------------------------------------


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
    no = torch.empty(0)
    pairs = [(n, before.get(n, no), after.get(n, no)) for n in {**before, **after}]
    return [n for n, *pair in pairs if not torch.equal(*map(torch.nan_to_num, pair))]
