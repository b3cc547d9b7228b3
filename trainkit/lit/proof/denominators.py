"""Denominators that a loss may have."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.core.class_weights import PerClassWeight
from trainkit.core.nested import Path, held_by, take_apart
from trainkit.core.strategies import (
    AccumulationStrategy,
    PerSample,
    PerToken,
    Uniform,
)
from trainkit.errors import TrainkitError

IGNORED = (-100, 0, -1, 255, 1)
"""Labels that often do not count: cross_entropy's own, and paddings."""

MEANT = 2
"""How far from simple the denominators are that must be told apart before others."""

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


def class_weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Weights of classes that a module may hold, by their path."""
    found: dict[str, Tensor] = {}
    for path, each in module.named_modules():
        for name, value in {**vars(each), **each._buffers}.items():
            is_vector = isinstance(value, Tensor) and value.ndim == 1
            if is_vector and 1 < len(value) <= 4096 and bool((value >= 0).all()):
                found[f"{path}.{name}".lstrip(".")] = value.detach().cpu().double()
    return found


def candidates(batch: Any, vectors: Mapping[str, Tensor]) -> list[Candidate]:
    """The denominators that a batch may hold, those first that are often meant.

    Args:
        batch: as `training_step` gets it.
        vectors: weights of classes, by their path.
    """
    found = []
    for strategy in (PerSample(), PerSample(size="")):
        with contextlib.suppress(TrainkitError):
            strategy.weight(batch)
            found.append(Candidate(strategy, 0))
            break
    for path, tensor in _tensors(batch):
        if tensor.ndim and tensor.numel():
            found += _of_tensor(int(path) if path.isdigit() else path, tensor, vectors)
    return sorted(found, key=lambda each: each.simplicity)


def _of_tensor(
    at: Path, tensor: Tensor, vectors: Mapping[str, Tensor]
) -> Iterator[Candidate]:
    yield Candidate(PerSample(size=at), 5)
    shifts = (False, True) if tensor.ndim > 1 and tensor.shape[-1] > 1 else (False,)
    is_number = tensor.is_floating_point() or tensor.is_complex()
    if not is_number and tensor.dtype is not torch.bool:
        for number, ignored in enumerate(IGNORED):
            for shift in shifts:
                strategy = PerToken(labels=at, ignore_index=ignored, shift=shift)
                yield Candidate(strategy, 1 + 2 * (number > 0) + shift)
        for name, vector in vectors.items():
            yield from _of_classes(at, tensor, name, vector)
    if tensor.dtype is torch.bool or bool((tensor >= 0).all()):
        simplicity = 2 if bool(((tensor == 0) | (tensor == 1)).all()) else 6
        if tensor.ndim == 1:
            yield Candidate(PerSample(mask=at), simplicity)
            return
        for shift in shifts:
            yield Candidate(PerToken(mask=at, shift=shift), simplicity + shift)


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
            yield Candidate(strategy, OFTEN_MEANT + (ignored != -100), line)


def class_counts(batch: Any, most: int = 64) -> dict[Path, Tensor]:
    """How many labels of each class a batch has, for each field that may hold them."""
    found: dict[Path, Tensor] = {}
    for path, tensor in _tensors(batch):
        if tensor.ndim and not (tensor.is_floating_point() or tensor.is_complex()):
            labels = tensor.long().flatten()
            labels = labels[labels >= 0]
            if labels.numel() and int(labels.max()) < most:
                counts = torch.bincount(labels, minlength=most).double()
                found[int(path) if path.isdigit() else path] = counts.cpu()
    return found


def _tensors(batch: Any) -> Iterator[tuple[str, Tensor]]:
    for path, value in take_apart(batch)[0]:
        if isinstance(value, Tensor):
            if path and not value.is_nested:
                yield path, value
        elif hasattr(value, "keys") and held_by(value):
            for key in sorted(value.keys(), key=("edge_index", "batch").__contains__):
                if isinstance(value[key], Tensor):
                    yield f"{path}.{key}".lstrip("."), value[key]
