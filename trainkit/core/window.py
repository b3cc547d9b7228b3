"""The open window on one rank: its losses, weights and counts."""

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
from trainkit.core.window_stats import COUNT, LARGEST, NUM_COLUMNS, SMALLEST, vector


@dataclass
class Window:
    """One rank's losses, weights and counts in an open window.

    They are kept as they come and added up once, when the window closes. So a step
    costs a few small operations, however many micro-batches it has.

    Attributes:
        strategies: say what micro-batches weigh, for each term of the loss.
        streamed: the division of windows whose total is not known.
        reduction: how the losses are added up; several terms are joined into a sum.
        weights: the weight of each micro-batch.
        applied: the weights by which gradients were really multiplied: a loss of half
            precision rounds them (in bfloat16, 1001 becomes 1000).
        losses: each loss as it went into the backward pass, detached.
        divisors: what the loop had divided each loss by.
        padding: the number of padding tokens in each micro-batch that was counted.
        tokens: the number of all tokens in each micro-batch that was counted.
        samples: the number of samples in each micro-batch that was counted.
        carried: the row of the micro-batches that a checkpoint has brought back.
        carried_weights: the weight of each of these, if it is known.
        num_skipped: how many micro-batches were left out, with weight 0.
        num_passes: how many backward passes have started from a weighted loss.
        is_torn: whether a backward pass has begun and not ended.
        is_apart: whether the last backward pass left the gradients on DDP's ranks.
        announced: all ranks' rows, once the window is complete.
        told: the window's totals, if they were announced before its first forward pass.
        division: how the losses are divided, chosen when the first one comes.
        joined: the terms of the micro-batch whose backward pass comes next.
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
        """How many micro-batches it has on this rank, with those of a checkpoint."""
        before = 0 if self.carried is None else int(self.carried[COUNT])
        return before + len(self.losses)

    @property
    def num_weighted(self) -> int:
        """How many micro-batches have a backward pass: all that were not skipped."""
        return len(self.losses) - self.num_skipped

    @property
    def is_open(self) -> bool:
        return bool(self.losses) or self.carried is not None

    def __post_init__(self) -> None:
        self.weigh_by(self.strategies)

    def weigh_by(self, strategies: Strategies) -> None:
        """Replace the strategies, before anything has been weighed."""
        self.strategies = strategies
        self.reduction = leading(strategies).loss_reduction
        if len(strategies) > 1:
            self.reduction = "sum"

    def join(self, terms: Mapping[str, Tensor] | Tensor) -> Tensor:
        """Return the terms of the next announced micro-batch as one loss, each divided
        by its own total."""
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
        """Count a micro-batch, and return what multiplies its gradient (None is 1)."""
        joined, self.joined = self.joined, None
        if joined is not None:  # its terms have factors of their own
            self._add(joined.weight, joined.weight, joined.value, 1)
            return None
        if self.told is not None:
            weight = next(iter(self.told.next_weights().values()))
        weight = checked_weight(weight)
        if self.division is None:
            self.division = self._choose_division(loss)
        factor: Weight
        applied = weight
        if isinstance(self.division, Told):
            factor = self.division.factor(weight, self.reduction, divided_by=divided_by)
        else:
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
        """Choose by the first loss: half precision would round w / W, so a window of
        such losses is divided when it closes."""
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
        """A copy whose lists can change without changing this window's."""
        lists = {name: [*v] for name, v in vars(self).items() if isinstance(v, list)}
        return replace(self, **lists)

    def skip(self, loss: Tensor) -> None:
        """Leave a micro-batch out: count it with weight 0."""
        self._add(0, 0, loss.new_zeros(()), 1)
        self.num_skipped += 1

    def count(
        self, *, padding: Weight = 0, tokens: Weight = 0, samples: Weight = 0
    ) -> None:
        """Add to the counts that `WindowStats` shows."""
        self.padding.append(padding)
        self.tokens.append(tokens)
        self.samples.append(samples)

    def row(self, device: torch.device, *, slots: int = 0) -> Tensor:
        """This rank's columns of `WindowStats`, in float64.

        Args:
            device: where the ranks exchange their rows.
            slots: how many single weights to append; NaN fills those not used.
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
        """The weight of each micro-batch on this rank, with those of a checkpoint."""
        return vector([*self.carried_weights, *self.weights], device)

    def _own_columns(self, weights: Tensor) -> Tensor:
        is_told = isinstance(self.division, Told)
        if is_told and weights.is_cpu and are_numbers(self.weights):
            return self._columns_on_host()
        losses = self._undivided_losses(weights.device)
        total = bare = losses.sum()
        if self.reduction == "mean":
            total = weighted_sum(losses, self.weights, weights)
        weight = divisor = weights.sum()
        if not all(map(operator.is_, self.applied, self.weights)):
            divisor = vector(self.applied, weights.device).sum()
        sums = torch.stack([weight, divisor, total, bare, *weights.aminmax()])
        return torch.cat([sums, vector(self._counts, weights.device)])

    def _columns_on_host(self) -> Tensor:
        """The columns by plain numbers, which cost less than one tensor operation."""
        weights = cast(list[float], self.weights)
        losses = [
            x.item() * by for x, by in zip(self.losses, self.divisors, strict=True)
        ]
        bare = math.fsum(losses) if all(map(math.isfinite, losses)) else sum(losses)
        total = bare
        if self.reduction == "mean":
            total = sum(w * x for w, x in zip(weights, losses, strict=True) if w)
        weight = math.fsum(weights)
        extremes = min(weights), max(weights)
        row = [weight, weight, total, bare, *extremes, *self._counts]
        return torch.tensor(row, dtype=torch.float64)

    @property
    def _counts(self) -> list[Weight]:
        counted = (self.padding, self.tokens, self.samples)
        return [len(self.losses), *map(sum, counted)]

    def _undivided_losses(self, device: torch.device) -> Tensor:
        losses = vector(self.losses, device)
        first = self.divisors[0]
        if all(divided_by == first for divided_by in self.divisors):
            return losses if first == 1 else losses * first
        return losses * vector(self.divisors, device)


def are_numbers(weights: Sequence[Weight]) -> bool:
    """Whether all weights are plain numbers, known on the host."""
    return not any(isinstance(weight, Tensor) for weight in weights)


def weighted_sum(
    values: Tensor, weights: Sequence[Weight], vector_of_weights: Tensor
) -> Tensor:
    """sum_i w_i * value_i, without the values of weight 0: a mean over nothing is NaN,
    and NaN * 0 is NaN."""
    if not (are_numbers(weights) and all(weights)):
        values = values.where(vector_of_weights != 0, vector_of_weights)
    return values.dot(vector_of_weights)


def merged(rows: Tensor) -> Tensor:
    """Several rows as one: sums are added up, extremes are taken of all."""
    row = rows[:, :NUM_COLUMNS].sum(0)
    row[SMALLEST] = rows[:, SMALLEST].amin()
    row[LARGEST] = rows[:, LARGEST].amax()
    return row
