"""What a window weighs, where that is known before its first forward pass."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from trainkit.core.ranks import Ranks
from trainkit.core.strategies import (
    AccumulationStrategy,
    LossReduction,
    Weight,
    checked_weight,
)
from trainkit.core.totals import vector
from trainkit.errors import TrainkitError

Strategies = Mapping[str, AccumulationStrategy]
"""A strategy for each term of a loss; a loss of one term has the name ""."""


class Expected:
    """The totals of a window, of each term and over all ranks.

    The ranks exchange them while the first micro-batch computes; then each loss is
    scaled exactly, and nothing is left to divide when the window closes.

        factor of micro-batch i in term t = multiplier * w_ti / sum_i w_ti

    where the multiplier takes the backend's mean over ranks out again. A loss that is
    a sum has 1 in place of w_ti; one whose sum stays a sum has the multiplier alone.

    Args:
        weights: for each term, what this rank's micro-batches weigh, in their order.
        ranks: those that share the window.
        device: where they meet.
    """

    def __init__(
        self,
        weights: Mapping[str, Sequence[Weight]],
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        self._weights = {t: [_on_host(w) for w in row] for t, row in weights.items()}
        self._multiplier = ranks.multiplier
        self._totals: dict[str, Weight] | None = None
        self._most: int | None = None
        self.num_micro_batches = len(next(iter(self._weights.values())))
        self.num_begun = 0
        own = {t: _sum(row, device) for t, row in self._weights.items()}
        if ranks.size == 1:
            self._totals, self._most = own, self.num_micro_batches
            return
        row = vector([*own.values(), self.num_micro_batches], device)
        self._shared = ranks.share(row)

    def next_weights(self) -> dict[str, Weight]:
        """What the micro-batch whose turn it is weighs, by term."""
        index, self.num_begun = self.num_begun, self.num_begun + 1
        if index >= self.num_micro_batches:
            raise TrainkitError(
                f"expect(): the window was to have {self.num_micro_batches} "
                f"micro-batches on this rank, and another one came. Pass expect() all "
                f"of the window's micro-batches, or finish() it before."
            )
        return {term: row[index] for term, row in self._weights.items()}

    def factor(self, term: str, weight: Weight, reduction: LossReduction) -> Weight:
        """By what the gradient of a micro-batch's loss is multiplied."""
        return self.share(term, weight, reduction) * self._multiplier

    def share(self, term: str, weight: Weight, reduction: LossReduction) -> Weight:
        """The same without the multiplier: how much of the term's loss it is."""
        if reduction == "total":
            return 1.0
        return quotient(weight if reduction == "mean" else 1, self.totals[term])

    @property
    def totals(self) -> dict[str, Weight]:
        """Of each term, over all ranks."""
        if self._totals is None:
            table = self._shared.wait()
            self._totals = dict(zip(self._weights, table.sum(0).unbind(), strict=False))
        return self._totals

    def most_micro_batches(self) -> int:
        """Those of the rank that has the most; waits for the device."""
        if self._most is None:
            self._most = int(self._shared.wait()[:, -1].amax())
        return self._most

    def refuse_unfinished(self) -> None:
        if self.num_begun != self.num_micro_batches:
            raise TrainkitError(
                f"finish(): the window was to have {self.num_micro_batches} "
                f"micro-batches on this rank, by expect(), and had {self.num_begun}: "
                f"its gradient would be too small. Run all of them, or drop() the "
                f"window."
            )


def weights_by_term(
    strategies: Strategies, batches: Iterable[object]
) -> dict[str, list[Weight]]:
    """What micro-batches weigh in each term."""
    listed = list(batches)
    if not listed:
        raise TrainkitError(
            "expect(): received no micro-batches, so the window's total is not known. "
            "Pass all that this rank will run; one of weight 0 if it has none."
        )
    return {
        term: [_on_host(strategy.weight(batch)) for batch in listed]
        for term, strategy in strategies.items()
    }


def _on_host(weight: Weight) -> Weight:
    """A number where it can be one without waiting; on a GPU it stays there."""
    if isinstance(weight, Tensor) and weight.is_cpu and weight.numel() == 1:
        weight = weight.item()
    return checked_weight(weight)


def _sum(weights: Sequence[Weight], device: torch.device) -> Weight:
    if any(isinstance(weight, Tensor) for weight in weights):
        return vector(weights, device).sum()
    return math.fsum(cast(Sequence[float], weights))


def quotient(part: Weight, total: Weight) -> Weight:
    """part / total; 0 where nothing weighs anything."""
    if isinstance(total, Tensor):
        return torch.where(total == 0, 0, part / total)
    if isinstance(part, Tensor):
        return part / total if total else part * 0
    return part / total if total else 0.0
