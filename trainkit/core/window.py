"""An open window: what one rank has seen of it."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from trainkit.core.expected import Expected
from trainkit.core.left import Left
from trainkit.core.ranks import Shared
from trainkit.core.strategies import LossReduction, Weight
from trainkit.core.terms import Joined
from trainkit.core.totals import vector
from trainkit.core.window_stats import LARGEST, NUM_COLUMNS, SMALLEST


@dataclass
class Window:
    """What one rank has seen of an open window.

    Everything is kept as it came and looked at once, when the window closes: a step
    costs a few small operations, however many micro-batches it has.

    Attributes:
        weights: what each micro-batch weighs.
        applied: the same after the rounding of a half-precision loss, which cannot
            carry 1001: what the gradients were really multiplied by.
        losses: each loss as it went into the backward pass, detached.
        divisors: what the loop had divided each of them by.
        padding: for each micro-batch looked at, how many of its tokens only pad.
        tokens: and how many it has in all.
        samples: for each micro-batch that was counted, how many it has.
        carried: the row of micro-batches that a checkpoint brought back.
        carried_weights: what each of these weighed, where that is known.
        num_skipped: how many micro-batches were left out, with weight 0.
        num_passes: how many backward passes have come from a weighted loss.
        left: what the last pass has left in the parameters.
        is_torn: whether a backward pass has begun and not ended.
        is_apart: whether the last one left DDP's ranks apart.
        announced: all ranks' rows, once the window is complete.
        expected: its totals, where it was told beforehand.
        joined: the terms of the micro-batch whose backward pass is to run.
        divides_late: whether it is divided at its end although it was told.
    """

    weights: list[Weight] = field(default_factory=list)
    applied: list[Weight] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    divisors: list[int] = field(default_factory=list)
    padding: list[Weight] = field(default_factory=list)
    tokens: list[Weight] = field(default_factory=list)
    samples: list[Weight] = field(default_factory=list)
    carried: Tensor | None = None
    carried_weights: list[Weight] = field(default_factory=list)
    num_skipped: int = 0
    num_passes: int = 0
    left: Left | None = None
    is_torn: bool = False
    is_apart: bool = False
    announced: Shared | None = None
    expected: Expected | None = None
    joined: Joined | None = None
    divides_late: bool = False

    @property
    def is_divided(self) -> bool:
        """Whether each gradient was divided by the window's total as it came."""
        return self.expected is not None and not self.divides_late

    @property
    def num_weighted(self) -> int:
        """Micro-batches whose backward pass is to run."""
        return len(self.losses) - self.num_skipped

    @property
    def is_open(self) -> bool:
        return bool(self.losses) or self.carried is not None

    def add(
        self, weight: Weight, applied: Weight, loss: Tensor, divided_by: int
    ) -> None:
        self.weights.append(weight)
        self.applied.append(applied)
        self.losses.append(loss.reshape(()) if loss.ndim else loss)
        self.divisors.append(divided_by)

    def copy(self) -> Window:
        """The same window, whose lists can grow apart."""
        other = replace(self)
        for name, value in vars(other).items():
            if isinstance(value, list):
                setattr(other, name, list(value))
        return other

    def skip(self, loss: Tensor) -> None:
        self.add(0, 0, loss.new_zeros(()), 1)
        self.num_skipped += 1

    def row(
        self, device: torch.device, reduction: LossReduction, *, slots: int = 0
    ) -> Tensor:
        """This rank's numbers, in float64.

        Args:
            device: where the ranks meet.
            reduction: whether the losses are means; else they are sums.
            slots: how many single weights to append, those not used as NaN.
        """
        weights = vector(self.weights, device)
        if self.losses:
            own = self._own_columns(weights, reduction)
        else:
            own = weights.new_zeros(NUM_COLUMNS)
        if self.carried is not None:
            own = merged(torch.stack([own, self.carried.to(own)]))
        if not slots:
            return own
        single = self.single(device)
        unused = single.new_full((max(slots - len(single), 0),), torch.nan)
        return torch.cat([own, single[:slots], unused])

    def single(self, device: torch.device) -> Tensor:
        """What each micro-batch of this rank weighs, also those of a checkpoint."""
        return vector([*self.carried_weights, *self.weights], device)

    def _own_columns(self, weights: Tensor, reduction: LossReduction) -> Tensor:
        if self.is_divided and weights.is_cpu and are_numbers(self.weights):
            return self._columns_on_host(reduction)
        losses = self._undivided_losses(weights.device)
        total = bare = losses.sum()
        if reduction == "mean":
            total = weighted_sum(losses, self.weights, weights)
        looked_at = (self.padding, self.tokens, self.samples)
        counts = [len(self.losses), *map(sum, looked_at)]
        weight = divisor = weights.sum()
        if not all(map(operator.is_, self.applied, self.weights)):
            divisor = vector(self.applied, weights.device).sum()
        sums = torch.stack([weight, divisor, total, bare, *weights.aminmax()])
        return torch.cat([sums, vector(counts, weights.device)])

    def _columns_on_host(self, reduction: LossReduction) -> Tensor:
        """The same in plain numbers: each tensor operation costs more than all this."""
        weights = cast(list[float], self.weights)
        losses = [
            x.item() * by for x, by in zip(self.losses, self.divisors, strict=True)
        ]
        bare = math.fsum(losses) if all(map(math.isfinite, losses)) else sum(losses)
        total = bare
        if reduction == "mean":
            total = sum(w * x for w, x in zip(weights, losses, strict=True) if w)
        weight = math.fsum(weights)
        looked_at = (self.padding, self.tokens, self.samples)
        counts = [len(losses), *map(sum, looked_at)]
        row = [weight, weight, total, bare, min(weights), max(weights), *counts]
        return torch.tensor(row, dtype=torch.float64)

    def _undivided_losses(self, device: torch.device) -> Tensor:
        losses = vector(self.losses, device)
        first = self.divisors[0]
        if all(divided_by == first for divided_by in self.divisors):
            return losses if first == 1 else losses * first
        return losses * vector(self.divisors, device)


def are_numbers(weights: Sequence[Weight]) -> bool:
    """Whether all are known on the host."""
    return not any(isinstance(weight, Tensor) for weight in weights)


def weighted_sum(
    values: Tensor, weights: Sequence[Weight], vector_of_weights: Tensor
) -> Tensor:
    """sum_i w_i * value_i. A mean over nothing is NaN, and NaN * 0 is NaN: what weighs
    nothing is left out."""
    if not (are_numbers(weights) and all(weights)):
        values = values.where(vector_of_weights != 0, vector_of_weights)
    return values.dot(vector_of_weights)


def merged(rows: Tensor) -> Tensor:
    """Several rows as one: the sums added up, the extremes taken again."""
    row = rows[:, :NUM_COLUMNS].sum(0)
    row[SMALLEST] = rows[:, SMALLEST].amin()
    row[LARGEST] = rows[:, LARGEST].amax()
    return row
