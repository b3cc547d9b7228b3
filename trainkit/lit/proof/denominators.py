"""Denominators that a loss may have, and which of them makes parts the whole."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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


@dataclass(frozen=True)
class Candidate:
    """A denominator, and the line to write for it.

    Attributes:
        line: the Python text of a strategy, or a phrase.
        weigh: what a batch weighs.
        simplicity: the lower, the rather it is meant, where several are equal.
        strategy: the same as a strategy, if there is one.
    """

    line: str
    weigh: Callable[[Any], float]
    simplicity: int
    strategy: AccumulationStrategy | None = None


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


def of_strategy(
    strategy: AccumulationStrategy, simplicity: int, line: str = ""
) -> Candidate:
    def weigh(batch: Any) -> float:
        return float(strategy.weight(batch))

    return Candidate(line or line_of(strategy), weigh, simplicity, strategy)


SUM = Candidate("a sum", lambda batch: 1.0, 3)
"""A loss that is a sum over rows: every part counts once, undivided."""

CONSTANT = Candidate("what no row changes", lambda batch: 1.0, 3)
"""A term of a loss that is alike for every part, such as a decay of weights."""

UNIFORM = of_strategy(Uniform(), 9)


def candidates(batch: Any, vectors: Mapping[str, Tensor]) -> list[Candidate]:
    """The denominators that a batch may hold, those first that are often meant.

    Args:
        batch: as `training_step` gets it.
        vectors: weights of classes that the module holds, by their path.
    """
    found = []
    for strategy in (PerSample(), PerSample(size="")):
        with contextlib.suppress(TrainkitError):
            strategy.weight(batch)
            found.append(of_strategy(strategy, 0))
            break
    for path, tensor in _tensors(batch):
        if tensor.ndim and tensor.numel():
            found += _of_tensor(int(path) if path.isdigit() else path, tensor, vectors)
    return sorted(found, key=lambda each: each.simplicity)


def _of_tensor(
    at: Path, tensor: Tensor, vectors: Mapping[str, Tensor]
) -> Iterator[Candidate]:
    yield of_strategy(PerSample(size=at), 5)
    shifts = (False, True) if tensor.ndim > 1 and tensor.shape[-1] > 1 else (False,)
    is_number = tensor.is_floating_point() or tensor.is_complex()
    if not is_number and tensor.dtype is not torch.bool:
        for number, ignored in enumerate(IGNORED):
            for shift in shifts:
                strategy = PerToken(labels=at, ignore_index=ignored, shift=shift)
                yield of_strategy(strategy, 1 + 2 * (number > 0) + shift)
        for name, vector in vectors.items():
            yield from _of_classes(at, tensor, name, vector)
    if tensor.dtype is torch.bool or bool((tensor >= 0).all()):
        simplicity = 2 if bool(((tensor == 0) | (tensor == 1)).all()) else 6
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
            yield of_strategy(strategy, 4 + (ignored != -100), line)


def class_counts(batch: Any, num_classes: int = 64) -> Iterator[tuple[Path, Tensor]]:
    """How many labels of each class a batch has, for each field that may hold them."""
    for path, tensor in _tensors(batch):
        if not (tensor.is_floating_point() or tensor.is_complex()) and tensor.ndim:
            labels = tensor.long().flatten()
            labels = labels[labels >= 0]
            if labels.numel() and int(labels.max()) < num_classes:
                at = int(path) if path.isdigit() else path
                yield at, torch.bincount(labels, minlength=num_classes).double()


def classes(batch: Any, num_rows: int) -> Iterator[Callable[[Any], float]]:
    """What counts the rows of each class, for fields with one label a row."""
    for at, counts in class_counts(batch):
        seen = counts.nonzero().flatten().tolist() if counts.sum() <= num_rows else []
        for each in seen:
            yield partial(_of_class, at, each)


def _of_class(at: Path, number: int, batch: Any) -> float:
    return float(dict(class_counts(batch))[at][number])


def _tensors(batch: Any) -> Iterator[tuple[str, Tensor]]:
    for path, value in take_apart(batch)[0]:
        if isinstance(value, Tensor):
            if path and not value.is_nested:
                yield path, value
        elif holds_named_tensors(value):
            for key in sorted(value.keys(), key=("edge_index", "batch").__contains__):
                if isinstance(value[key], Tensor):
                    yield f"{path}.{key}".lstrip("."), value[key]


# ---- what makes the parts the whole --------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """The best weights of parts.

    Attributes:
        weights: one for each part.
        off: how far the parts with them are from the whole.
    """

    weights: Tensor
    off: float


def off_by(whole: Tensor, parts: Tensor, weights: Tensor) -> float:
    """How far weighted parts are from the whole, as a share of its size."""
    size = float(torch.linalg.vector_norm(whole))
    apart = float(torch.linalg.vector_norm(whole - weights.to(parts) @ parts))
    return apart / size if size else float(apart > 0)


def best_fit(whole: Tensor, parts: Tensor, *, adds_up: bool = True) -> Fit:
    """The weights with which parts are nearest to the whole.

    Args:
        whole: a gradient.
        parts: the gradients of its parts, one row each.
        adds_up: whether the weights must add up to one.
    """
    inner, target = parts, whole
    if adds_up:
        size = torch.linalg.vector_norm(whole).expand(len(parts), 1)
        inner, target = torch.cat([parts, size], 1), torch.cat([whole, size[0]])
    weights = torch.linalg.lstsq(inner.T, target[:, None], driver="gelsd").solution
    return Fit(weights[:, 0], off_by(whole, parts, weights[:, 0]))


def two_denominators(
    gradients: Mapping[frozenset[int], Tensor],
    counts: Mapping[Candidate, Sequence[float]],
    most: float,
) -> tuple[Candidate, Candidate] | None:
    """Two denominators whose terms make up the gradients of all unions of parts.

    A term may be a sum, or a constant that no row changes.

    Args:
        gradients: of unions of parts, by the parts' numbers.
        counts: what the parts weigh, by candidate.
        most: the largest deviation that counts as none.
    """
    unions, number = list(gradients), len(next(iter(counts.values()), ()))
    stacked = torch.stack([gradients[union] for union in unions])
    members = torch.tensor([[n in u for n in range(number)] for u in unions]).double()
    columns = {
        candidate: members
        / (members @ torch.tensor(each, dtype=torch.float64))[:, None]
        for candidate, each in counts.items()
        if all(value > 0 for value in each)
    }
    columns[SUM], columns[CONSTANT] = members, torch.ones(len(unions), 1).double()
    size, found = float(torch.linalg.matrix_norm(stacked)), []
    for one, other in itertools.combinations(columns, 2):
        basis = torch.cat([columns[one], columns[other]], 1)
        inside = basis @ torch.linalg.lstsq(basis, stacked, driver="gelsd").solution
        off = float(torch.linalg.matrix_norm(stacked - inside)) / size
        if off <= most:
            found.append((basis.shape[1], off, one, other))
    # A constant is a mean of anything: what has fewer columns says more.
    best = min(found, key=lambda each: each[:2], default=None)
    return None if best is None else best[2:]
