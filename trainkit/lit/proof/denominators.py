"""Denominators that a loss may have."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainkit.core.class_weights import PerClassWeight
from trainkit.core.nested import Path, holds_named_tensors, take_apart
from trainkit.core.strategies import (
    AccumulationStrategy,
    PerSample,
    PerToken,
    Uniform,
)
from trainkit.errors import TrainkitError

IGNORED = (-100, 0, -1, 255, 1)
"""Labels that often do not count: cross_entropy's own, and paddings."""

MOST_SHOWN = 32
"""Weights of more classes are not written out."""

OFTEN_MEANT = 4
"""What a loss divides by as a rule is at most so far from simple."""


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


@dataclass(frozen=True, eq=False)
class Candidate:
    """A denominator that a loss may have.

    Attributes:
        strategy: that counts it; None where every part counts once.
        simplicity: the lower, the rather it is meant, where several are equal.
        text: the Python text of the strategy, or a phrase; default: as it is made.
    """

    strategy: AccumulationStrategy | None
    simplicity: int
    text: str = ""

    @property
    def line(self) -> str:
        """The line to write for it."""
        return self.text or line_of(self.strategy or Uniform())

    def weigh(self, batch: Any) -> float:
        """What a batch weighs."""
        return 1.0 if self.strategy is None else float(self.strategy.weight(batch))


SUM = Candidate(None, 3, "a sum over rows")
"""A loss that is a sum over rows: every part counts once, undivided."""

UNIFORM = Candidate(Uniform(), 9)


def candidates(batch: Any, class_weights: Sequence[Tensor] = ()) -> list[Candidate]:
    """The denominators that a batch may hold, those first that are often meant.

    Args:
        batch: as `training_step` gets it.
        class_weights: that some loss was given.
    """
    found = []
    for strategy in (PerSample(), PerSample(size="")):
        with contextlib.suppress(TrainkitError):
            strategy.weight(batch)
            found.append(Candidate(strategy, 0))
            break
    for path, tensor in _tensors(batch):
        if tensor.ndim and tensor.numel():
            at = int(path) if path.isdigit() else path
            found += _of_tensor(at, tensor, class_weights)
    return sorted(found, key=lambda each: each.simplicity)


def _of_tensor(
    at: Path, tensor: Tensor, class_weights: Sequence[Tensor]
) -> Iterator[Candidate]:
    yield Candidate(PerSample(size=at), 5)
    shifts = (False, True) if tensor.ndim > 1 and tensor.shape[-1] > 1 else (False,)
    is_number = tensor.is_floating_point() or tensor.is_complex()
    if not is_number and tensor.dtype is not torch.bool:
        for number, ignored in enumerate(IGNORED):
            for shift in shifts:
                strategy = PerToken(labels=at, ignore_index=ignored, shift=shift)
                yield Candidate(strategy, 1 + 2 * (number > 0) + shift)
        for each in class_weights:
            yield from _of_classes(at, tensor, each)
    if tensor.dtype is torch.bool or bool((tensor >= 0).all()):
        simplicity = 2 if bool(((tensor == 0) | (tensor == 1)).all()) else 6
        if tensor.ndim == 1:
            yield Candidate(PerSample(mask=at), simplicity)
            return
        for shift in shifts:
            yield Candidate(PerToken(mask=at, shift=shift), simplicity + shift)


def _of_classes(at: Path, labels: Tensor, weights: Tensor) -> Iterator[Candidate]:
    numbers = [round(each, 6) for each in weights.tolist()]
    shown = f"{numbers}" if len(numbers) <= MOST_SHOWN else "[...]"
    for ignored in IGNORED[:4]:
        within = labels[labels != ignored]
        if within.numel() and bool(((within >= 0) & (within < len(weights))).all()):
            strategy = PerClassWeight(weight=weights, labels=at, ignore_index=ignored)
            options = [f"weight={shown}", f"labels={at!r}"]
            options += [f"ignore_index={ignored}"] if ignored != -100 else []
            line = f"PerClassWeight({', '.join(options)})"
            yield Candidate(strategy, OFTEN_MEANT + (ignored != -100), line)


def _tensors(batch: Any) -> Iterator[tuple[str, Tensor]]:
    for path, value in take_apart(batch)[0]:
        if isinstance(value, Tensor):
            if path and not value.is_nested:
                yield path, value
        elif holds_named_tensors(value):
            for key in sorted(value.keys(), key=("edge_index", "batch").__contains__):
                if isinstance(value[key], Tensor):
                    yield f"{path}.{key}".lstrip("."), value[key]
