"""What a pass of `training_step` has found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainkit.lit.measure.calls import Seen


@dataclass(frozen=True)
class Term:
    """A loss that a pass went backward from.

    Attributes:
        name: of the term; "" for a loss of one term.
        loss: its value.
        gradient: the coordinates that are kept.
        batch: what `accumulate` got to be weighed, if it got a batch.
        weight: what `accumulate` or `weigh` got as a weight; None where they got none.
        is_plain: whether a module with the mixin gave it to `manual_backward`.
    """

    name: str
    loss: float
    gradient: Tensor
    batch: Any = None
    weight: float | None = None
    is_plain: bool = False


@dataclass(frozen=True)
class Pass:
    """What `training_step` has made of a batch.

    Attributes:
        terms: one for each backward call, in order.
        seen: what its calls of torch were.
    """

    terms: tuple[Term, ...]
    seen: Seen

    @property
    def gradient(self) -> Tensor:
        return torch.stack([term.gradient for term in self.terms]).sum(0)

    def weight(self, name: str) -> float | None:
        """What `accumulate` or `weigh` got as the weight of a term, if they got one."""
        found = (term.weight for term in self.terms if term.name == name)
        return next(found, None)
