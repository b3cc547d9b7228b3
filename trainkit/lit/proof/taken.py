"""The gradients that a rehearsal's optimizers would have taken."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainkit.lit.proof.draws import Draws

Key = tuple[int, int, str]


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


def _norm(tensor: Any) -> float:
    return float(torch.linalg.vector_norm(tensor).double())
