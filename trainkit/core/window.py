"""An open window: what one rank has seen of it."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from trainkit.core.division import Streamed, Told
from trainkit.core.gradients import HALF
from trainkit.core.ranks import Shared
from trainkit.core.strategies import (
    LossReduction,
    Strategies,
    Weight,
    checked_weight,
)
from trainkit.core.terms import Joined, join, leading, missing_terms, untold_terms
from trainkit.core.totals import vector
from trainkit.core.window_stats import COUNT, LARGEST, NUM_COLUMNS, SMALLEST


@dataclass
class Window:
    """One rank's losses, weights and totals in an open window.

    Everything is kept as it came and looked at once, when the window closes: a step
    costs a few small operations, however many micro-batches it has.

    Attributes:
        strategies: say what micro-batches weigh, for each term of the loss.
        streamed: the division of windows whose total is not known.
        reduction: how the losses are added up; several terms are joined into a sum.
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
        is_torn: whether a backward pass has begun and not ended.
        is_apart: whether the last one left DDP's ranks apart.
        announced: all ranks' rows, once the window is complete.
        told: its totals, where they were announced before its first forward pass.
        division: what its losses are divided by, chosen when the first of them comes.
        joined: the terms of the micro-batch whose backward pass is to run.
    """

    strategies: Strategies
    streamed: Streamed
    reduction: LossReduction = field(init=False)
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
    is_torn: bool = False
    is_apart: bool = False
    announced: Shared | None = None
    told: Told | None = None
    division: Told | Streamed | None = None
    joined: Joined | None = None

    @property
    def num_micro_batches(self) -> int:
        """How many it holds on this rank, those of a checkpoint included."""
        before = 0 if self.carried is None else int(self.carried[COUNT])
        return before + len(self.losses)

    @property
    def num_weighted(self) -> int:
        """Micro-batches whose backward pass is to run."""
        return len(self.losses) - self.num_skipped

    @property
    def is_open(self) -> bool:
        return bool(self.losses) or self.carried is not None

    def __post_init__(self) -> None:
        self.weigh_by(self.strategies)

    def weigh_by(self, strategies: Strategies) -> None:
        """Take other strategies, while nothing has been weighed."""
        self.strategies = strategies
        self.reduction = leading(strategies).loss_reduction
        if len(strategies) > 1:
            self.reduction = "sum"

    def join(self, terms: Mapping[str, Tensor] | Tensor) -> Tensor:
        """The terms of the next announced micro-batch as one loss, each divided by its
        own total."""
        if self.told is None:
            raise untold_terms(self.strategies)
        weights = self.told.next_weights()
        if not isinstance(terms, Mapping):
            raise missing_terms(terms, self.strategies)
        self.division = self.told
        self.joined = join(terms, weights, self.strategies, self.told)
        return self.joined.loss

    def enter(
        self,
        loss: Tensor,
        weight: Weight | None = None,
        *,
        value: Tensor | None = None,
        divided_by: int = 1,
        expected: int = 1,
    ) -> Weight | None:
        """Count a micro-batch; by what its gradient is multiplied (None is 1)."""
        joined, self.joined = self.joined, None
        if joined is not None:  # its terms have factors of their own
            self._add(joined.weight, joined.weight, joined.value, 1)
            return None
        if self.told is not None:
            weight = next(iter(self.told.next_weights().values()))
        weight = checked_weight(weight)
        if self.division is None:
            self.division = self._choose_division(loss)
        factor, applied = self.division.factor(
            loss, weight, self.reduction, divided_by=divided_by, expected=expected
        )
        if value is None:
            # clone: the next step of a CUDA graph writes over this one's loss
            value = loss.detach().clone()
        self._add(weight, applied, value, divided_by)
        if isinstance(factor, Tensor):
            return factor.to(loss.device, loss.dtype)
        return factor

    def _choose_division(self, loss: Tensor) -> Told | Streamed:
        """By the first loss: one of half precision would round w / W, so that such a
        window is divided when it closes."""
        if self.told is not None and loss.dtype not in HALF:
            return self.told
        if self.carried is None:
            self.streamed.open(loss.device)
        return self.streamed

    def _add(
        self, weight: Weight, applied: Weight, loss: Tensor, divided_by: int
    ) -> None:
        self.weights.append(weight)
        self.applied.append(applied)
        self.losses.append(loss.reshape(()) if loss.ndim else loss)
        self.divisors.append(divided_by)

    def copy(self) -> Window:
        """A copy of the window with lists of its own."""
        other = replace(self)
        for name, value in vars(other).items():
            if isinstance(value, list):
                setattr(other, name, list(value))
        return other

    def skip(self, loss: Tensor) -> None:
        self._add(0, 0, loss.new_zeros(()), 1)
        self.num_skipped += 1

    def count(
        self, *, padding: Weight = 0, tokens: Weight = 0, samples: Weight = 0
    ) -> None:
        """Count what `WindowStats` shows: tokens, those that only pad, samples."""
        self.padding.append(padding)
        self.tokens.append(tokens)
        self.samples.append(samples)

    def row(self, device: torch.device, *, slots: int = 0) -> Tensor:
        """This rank's numbers, in float64.

        Args:
            device: where the ranks meet.
            slots: how many single weights to append, those not used as NaN.
        """
        weights = vector(self.weights, device)
        if self.losses:
            own = self._own_columns(weights)
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

    def _own_columns(self, weights: Tensor) -> Tensor:
        is_told = isinstance(self.division, Told)
        if is_told and weights.is_cpu and are_numbers(self.weights):
            return self._columns_on_host()
        losses = self._undivided_losses(weights.device)
        total = bare = losses.sum()
        if self.reduction == "mean":
            total = weighted_sum(losses, self.weights, weights)
        looked_at = (self.padding, self.tokens, self.samples)
        counts = [len(self.losses), *map(sum, looked_at)]
        weight = divisor = weights.sum()
        if not all(map(operator.is_, self.applied, self.weights)):
            divisor = vector(self.applied, weights.device).sum()
        sums = torch.stack([weight, divisor, total, bare, *weights.aminmax()])
        return torch.cat([sums, vector(counts, weights.device)])

    def _columns_on_host(self) -> Tensor:
        """The columns in plain numbers: one tensor operation would cost more."""
        weights = cast(list[float], self.weights)
        losses = [
            x.item() * by for x, by in zip(self.losses, self.divisors, strict=True)
        ]
        bare = math.fsum(losses) if all(map(math.isfinite, losses)) else sum(losses)
        total = bare
        if self.reduction == "mean":
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
