"""Gradients that are kept to be compared: some coordinates of each, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

MOST = 4096
"""The most coordinates that are kept of a tensor: half of them are its largest."""


class Coordinates:
    """The coordinates of a list of gradients that are kept, chosen by the first list.

    >>> kept = Coordinates([torch.tensor([3.0, 0.0]), None])
    >>> kept.of([torch.tensor([3.0, 4.0]), None])
    tensor([3., 4.], dtype=torch.float64)

    Args:
        gradients: of the whole batch; None for a parameter without one.
        most: how many of each tensor at most.
        sizes: the number of coordinates of each parameter, where the gradient is None.
    """

    def __init__(
        self,
        gradients: Sequence[Tensor | None],
        *,
        most: int = MOST,
        sizes: Sequence[int] | None = None,
    ) -> None:
        self._indices: list[Tensor | None] = []
        self._sizes = []
        for number, gradient in enumerate(gradients):
            size = gradient.numel() if gradient is not None else 0
            if sizes is not None:
                size = sizes[number]
            self._indices.append(_indices(gradient, size, most))
            self._sizes.append(min(size, most))

    def of(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """One vector of the kept coordinates; a missing gradient is zero."""
        parts = []
        for gradient, at, size in zip(
            gradients, self._indices, self._sizes, strict=True
        ):
            if gradient is None:
                parts.append(torch.zeros(size, dtype=torch.float64))
                continue
            flat = _dense(gradient).detach().reshape(-1)
            kept = flat if at is None else flat[at.to(flat.device)]
            if kept.is_complex():  # one number for both, by a linear map
                kept = kept.real + math.pi * kept.imag
            parts.append(kept.to("cpu", torch.float64))
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)

    def split(self, vector: Tensor) -> list[Tensor]:
        """The parts of a vector, by tensor."""
        return list(vector.split(self._sizes))


def _indices(gradient: Tensor | None, size: int, most: int) -> Tensor | None:
    if size <= most:
        return None
    # By Python's own class: draws of torch and of `random` are watched meanwhile.
    drawn = torch.tensor(Random(0).choices(range(size), k=most))
    if gradient is None:
        return drawn
    flat = _dense(gradient).detach().reshape(-1).abs().float()
    largest = flat.topk(most // 2).indices.cpu()
    return torch.cat([largest, drawn[most // 2 :]])


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.layout is not torch.strided else gradient


@dataclass(frozen=True)
class Fit:
    """Weights with which parts add up to the whole as well as they can.

    Attributes:
        weights: one for each part.
        deviation: what is left, as a share of the whole's size.
        condition: how much an error in a gradient is magnified in the weights.
    """

    weights: Tensor
    deviation: float
    condition: float


def size_of(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector))


def share_of(off: Tensor, whole: Tensor) -> float:
    """The size of a vector, as a share of the whole's if that is not zero."""
    return size_of(off) / (size_of(whole) or 1.0)


def added(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """The sum of two gradients of a parameter; None where it has neither."""
    return other if one is None else one if other is None else one + other


def weighted(parts: Tensor, weights: Tensor) -> Tensor:
    """The parts times their weights. A part of weight 0 counts nothing, also if the
    mean of nothing is not a number there."""
    return torch.where(weights[:, None] == 0, 0.0, parts * weights[:, None])


def deviation(whole: Tensor, parts: Tensor, weights: Tensor) -> float:
    """How far the weighted parts are from the whole, as a share of its size.

    A whole that nearly vanishes is measured against a tenth of its parts.

    Args:
        whole: a vector.
        parts: one row for each part.
        weights: one for each part.
    """
    each = weighted(parts, weights)
    of_parts = torch.linalg.vector_norm(each, dim=1).sum()
    size = max(size_of(whole), 0.1 * float(of_parts))
    off = size_of(whole - each.sum(0))
    found = off / size if size else off
    return math.inf if math.isnan(found) else found  # never below a tolerance


def best_fit(whole: Tensor, parts: Tensor) -> Fit:
    """The weights by which the parts come nearest to the whole; a part that is not
    finite, such as a mean of nothing, gets none."""
    parts = torch.where(torch.isfinite(parts).all(1)[:, None], parts, 0.0)
    sizes = torch.linalg.vector_norm(parts, dim=1).clamp_min(1e-300)
    basis = (parts / sizes[:, None]).T
    values = torch.linalg.svdvals(basis)
    smallest = float(values[-1]) if len(values) else 0.0
    condition = float(values[0]) / smallest if smallest > 0 else float("inf")
    found = torch.linalg.lstsq(basis, whole[:, None], driver="gelsd").solution[:, 0]
    off = size_of(whole - basis @ found)
    size = size_of(whole)
    return Fit(found / sizes, off / size if size else off, condition)
