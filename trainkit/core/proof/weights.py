"""Which weights make the parts' gradients add up to that of the whole."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainkit.core.proof.candidates import CONSTANT, SUM, UNIFORM, Candidate
from trainkit.core.proof.gradients import best_fit, deviation

MOST_OFF_ONE = 1e-5
"""The shares of a window's parts add up to 1, whatever a strategy counts."""

MOST_MAGNIFIED = 1e8
"""A fit of a worse condition says nothing about the weights."""


@dataclass(frozen=True)
class Measured:
    """The gradient of a whole and those of its parts.

    Attributes:
        whole: a vector.
        parts: one row for each part.
        loss: of the whole.
        losses: of the parts.
    """

    whole: Tensor
    parts: Tensor
    loss: float
    losses: Tensor

    def off_by(self, weights: Tensor) -> float:
        return deviation(self.whole, self.parts, weights)


@dataclass(frozen=True)
class Counts:
    """What a candidate counts in the whole and in each part."""

    whole: float
    parts: Tensor

    @property
    def weights(self) -> Tensor:
        return self.parts / self.whole if self.whole else torch.zeros_like(self.parts)

    @property
    def adds_up(self) -> bool:
        """Whether the parts count as much as the whole; a spread or a padded size of
        parts does not."""
        return abs(float(self.weights.sum()) - 1) <= MOST_OFF_ONE


@dataclass(frozen=True)
class Explained:
    """The weights that were found, in words of denominators.

    Attributes:
        classes: the denominators that are right, those that are equal on these rows
            together, and the simplest first; empty where there is none.
        function: what of the mean the loss is: "", "square root" or "logarithm".
        weights: one for each part.
        deviation: how far the weighted parts are from the whole.
        is_clear: whether a little more rounding would find about these weights.
    """

    classes: tuple[Candidate, ...]
    function: str
    weights: Tensor
    deviation: float
    is_clear: bool = True


def explain(
    measured: Measured, known: Mapping[Candidate, Counts], tolerance: float
) -> Explained | None:
    """What makes the parts add up to the whole; None where nothing does."""
    fits = _fitting(measured, known, tolerance)
    if fits:
        best = min(measured.off_by(weights) for _, weights in fits)
        return Explained(tuple(each for each, _ in fits), "", fits[0][1], best)
    for function, scale in (
        ("square root", lambda loss: loss),
        ("logarithm", torch.exp),
    ):
        found = _of_function(measured, known, tolerance, function, scale)
        if found is not None:
            return found
    fit = best_fit(*with_sum(measured.whole, measured.parts))
    if fit.deviation > tolerance or _selects(measured, fit.weights):
        return None
    is_clear = fit.condition <= MOST_MAGNIFIED
    return Explained((), "", fit.weights, fit.deviation, is_clear)


def with_sum(whole: Tensor, parts: Tensor) -> tuple[Tensor, Tensor]:
    """The whole and its parts, with one coordinate by which weights add up to 1."""
    size = torch.linalg.vector_norm(whole)
    ones = size.expand(len(parts), 1)
    return torch.cat([whole, size[None]]), torch.cat([parts, ones], 1)


def least_off(whole: Tensor, parts: Tensor) -> float:
    """How far the parts are from the whole with the best shares, or as a sum."""
    as_sum = torch.ones(len(parts), dtype=torch.float64)
    fit = best_fit(*with_sum(whole, parts))
    return min(fit.deviation, deviation(whole, parts, as_sum))


def _selects(measured: Measured, weights: Tensor) -> bool:
    """Whether the whole is one of its parts, or a difference, as with a maximum."""
    sizes = torch.linalg.vector_norm(measured.parts, dim=1)
    counts = sizes > 1e-9 * sizes.max()
    return bool((weights[counts] < 1e-6 * weights.abs().max()).any())


def _fitting(
    measured: Measured, known: Mapping[Candidate, Counts], tolerance: float
) -> list[tuple[Candidate, Tensor]]:
    number = len(measured.parts)
    weights = {each: counts.weights for each, counts in known.items() if counts.adds_up}
    weights[SUM] = torch.ones(number, dtype=torch.float64)
    weights[UNIFORM] = weights[SUM] / number
    fits = [each for each in weights.items() if measured.off_by(each[1]) <= tolerance]
    return sorted(fits, key=lambda each: each[0].simplicity)


def _of_function(
    measured: Measured,
    known: Mapping[Candidate, Counts],
    tolerance: float,
    function: str,
    scale: Callable[[Tensor], Tensor],
) -> Explained | None:
    whole = scale(torch.tensor(measured.loss, dtype=torch.float64))
    for candidate, counts in known.items():
        if not counts.adds_up:
            continue
        weights = counts.weights * scale(measured.losses) / whole
        if torch.isfinite(weights).all():
            off = measured.off_by(weights)
            if off <= tolerance:
                return Explained((candidate,), function, weights, off)
    return None


def two_denominators(
    gradients: Mapping[frozenset[int], Tensor],
    counts: Mapping[Candidate, Sequence[float]],
    tolerance: float,
) -> tuple[Candidate, Candidate] | None:
    """Two denominators whose terms make up the gradients of all unions of parts.

    A term may be a sum, or a constant that no row changes.

    Args:
        gradients: of unions of parts, by the parts' numbers.
        counts: what the parts weigh, by candidate.
        tolerance: the largest deviation that counts as none.
    """
    unions = list(gradients)
    stacked = torch.stack([gradients[union] for union in unions])
    size = float(torch.linalg.matrix_norm(stacked))
    if not size:
        return None
    columns = {
        candidate: _indicators(unions, each)
        for candidate, each in counts.items()
        if all(value > 0 for value in each)
    }
    number = len(next(iter(counts.values()), ()))
    columns[SUM] = torch.stack([_members(union, number) for union in unions])
    columns[CONSTANT] = torch.ones(len(unions), 1, dtype=torch.float64)
    found: list[tuple[int, float, Candidate, Candidate]] = []
    for one, other in itertools.combinations(columns, 2):
        basis = torch.cat([columns[one], columns[other]], 1)
        inside = basis @ torch.linalg.lstsq(basis, stacked, driver="gelsd").solution
        off = float(torch.linalg.matrix_norm(stacked - inside)) / size
        if off <= tolerance:
            found.append((basis.shape[1], off, one, other))
    # A constant is a mean of anything: what has fewer columns says more.
    best = min(found, key=lambda each: each[:2], default=None)
    return None if best is None else best[2:]


def _members(union: frozenset[int], number: int) -> Tensor:
    return torch.tensor([float(part in union) for part in range(number)]).double()


def _indicators(unions: Sequence[frozenset[int]], counts: Sequence[float]) -> Tensor:
    members = torch.stack([_members(union, len(counts)) for union in unions])
    totals = members @ torch.tensor(counts, dtype=torch.float64)
    return members / totals[:, None]
