"""The denominators that a loss may have, as strategies for the fields of a batch."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trainkit.core.batches import Path
from trainkit.core.split.fields import holds_named_tensors, take_apart
from trainkit.core.strategies import (
    AccumulationStrategy,
    PerClassWeight,
    PerSample,
    PerToken,
    Uniform,
)
from trainkit.errors import TrainkitError

IGNORED = (-100, 0, -1, 255, 1)
"""Labels that often do not count: cross_entropy's own, and paddings."""

STRUCTURE = ("edge_index", "batch", "ptr")
"""Fields of graphs that are seldom what a loss counts."""


@dataclass(frozen=True)
class Candidate:
    """A denominator, and the line to write for it.

    Attributes:
        line: the Python text of a strategy, or a phrase.
        weigh: what a batch weighs.
        simplicity: the lower, the rather it is meant, where several are equal.
        seen: where it was seen in a call, and how to write it, as text; or None.
    """

    line: str
    weigh: Callable[[Any], float]
    simplicity: int
    seen: tuple[str, str] | None = None


def line_of(strategy: AccumulationStrategy) -> str:
    """The Python text of a strategy, without what is left at its default.

    >>> line_of(PerToken(labels="y", shift=True))
    "PerToken(labels='y', shift=True)"
    """
    if not dataclasses.is_dataclass(strategy):
        return type(strategy).__name__ + "(...)"
    options = [
        f"{field.name}={getattr(strategy, field.name)!r}"
        for field in dataclasses.fields(strategy)
        if getattr(strategy, field.name) != field.default
    ]
    return f"{type(strategy).__name__}({', '.join(options)})"


def of_strategy(strategy: AccumulationStrategy, simplicity: int) -> Candidate:
    def weigh(batch: Any) -> float:
        return float(strategy.weight(batch))

    return Candidate(line_of(strategy), weigh, simplicity)


def candidates(batch: Any, vectors: Mapping[str, Tensor]) -> list[Candidate]:
    """The denominators that a batch may hold, those first that are often meant.

    Args:
        batch: as `training_step` gets it.
        vectors: weights of classes that the module holds, by their path.
    """
    found = list(_of_rows(batch))
    for path, tensor in _tensors(batch):
        found += _of_tensor(path, tensor, vectors)
    return sorted(found, key=lambda each: each.simplicity)


def _of_rows(batch: Any) -> Iterator[Candidate]:
    for strategy in (PerSample(), PerSample(size="")):
        with contextlib.suppress(TrainkitError):
            strategy.weight(batch)
            yield of_strategy(strategy, 0)
            return


def _of_tensor(
    path: str, tensor: Tensor, vectors: Mapping[str, Tensor]
) -> Iterator[Candidate]:
    if not tensor.ndim or not tensor.numel():
        return
    at = int(path) if path.isdigit() else path
    yield of_strategy(PerSample(size=at), 5)
    shifts = (False, True) if tensor.ndim > 1 and tensor.shape[-1] > 1 else (False,)
    if _is_whole(tensor):
        for number, ignored in enumerate(IGNORED):
            for shift in shifts:
                strategy = PerToken(labels=at, ignore_index=ignored, shift=shift)
                yield of_strategy(strategy, 1 + 2 * (number > 0) + shift)
        for name, vector in vectors.items():
            yield from _of_classes(at, tensor, name, vector)
    if tensor.dtype is torch.bool or bool((tensor >= 0).all()):
        simplicity = 2 if _is_mask(tensor) else 6
        if tensor.ndim == 1:
            yield of_strategy(PerSample(mask=at), simplicity)
            return
        for shift in shifts:
            yield of_strategy(PerToken(mask=at, shift=shift), simplicity + shift)


def _of_classes(
    at: Path, labels: Tensor, name: str, vector: Tensor
) -> Iterator[Candidate]:
    """Weights of classes, which the module holds under a name."""
    for ignored in IGNORED[:4]:
        within = labels[labels != ignored]
        if within.numel() and bool(((within >= 0) & (within < len(vector))).all()):
            strategy = PerClassWeight(weight=vector, labels=at, ignore_index=ignored)
            options = [f"weight=self.{name}", f"labels={at!r}"]
            options += [f"ignore_index={ignored}"] if ignored != -100 else []
            line = f"PerClassWeight({', '.join(options)})"
            simplicity = 4 + (ignored != -100)
            yield replace(of_strategy(strategy, simplicity), line=line)


def _tensors(batch: Any) -> Iterable[tuple[str, Tensor]]:
    for path, value in take_apart(batch)[0]:
        if isinstance(value, Tensor):
            if path and not value.is_nested:
                yield path, value
        elif holds_named_tensors(value):
            for key in sorted(value.keys(), key=STRUCTURE.__contains__):
                if isinstance(value[key], Tensor):
                    yield f"{path}.{key}".lstrip("."), value[key]


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex()) and (
        tensor.dtype is not torch.bool
    )


def _is_mask(tensor: Tensor) -> bool:
    return tensor.dtype is torch.bool or bool(((tensor == 0) | (tensor == 1)).all())


SUM = Candidate("a sum", lambda batch: 1.0, 3)
"""A loss that is a sum over rows: every part counts once, undivided."""

CONSTANT = Candidate("what no row changes", lambda batch: 1.0, 3)
"""A term of a loss that is alike for every part, such as a decay of weights."""

UNIFORM = of_strategy(Uniform(), 9)
