"""A window whose total weight is known before its first forward pass."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from trainkit.core.ranks import Ranks
from trainkit.core.strategies import Strategies, Weight, checked_weight
from trainkit.core.window import vector
from trainkit.errors import TrainkitError


class Told:
    """What a window's micro-batches weigh, announced by each rank beforehand.

    The ranks exchange their totals while the first micro-batch computes.

    Args:
        weights: for each term, the weights of this rank's micro-batches, in order, as
            `on_host` leaves them.
        ranks: the ranks that share the window.
        device: where the ranks exchange their totals.

    Attributes:
        leading: the name of the first term.
    """

    def __init__(
        self,
        weights: Mapping[str, Sequence[Weight]],
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        self._terms = list(weights)
        self.leading = self._terms[0]
        # For each micro-batch what it weighs in each term.
        self._rows = [
            dict(zip(weights, row, strict=True))
            for row in zip(*weights.values(), strict=True)
        ]
        self.num_micro_batches = len(self._rows)
        self.num_begun = 0
        self._totals: dict[str, Weight] | None = None
        self._most: int | None = None
        own = {term: _sum(column, device) for term, column in weights.items()}
        if ranks.size == 1:
            self._totals, self._most = own, self.num_micro_batches
            return
        row = vector([*own.values(), self.num_micro_batches], device)
        self._shared = ranks.gather_rows(row)

    def next_weights(self) -> dict[str, Weight]:
        """Return the weights of the next micro-batch, by term."""
        index, self.num_begun = self.num_begun, self.num_begun + 1
        if index >= self.num_micro_batches:
            raise TrainkitError(
                f"expect(): the window was to have {self.num_micro_batches} "
                f"micro-batches on this rank, and another one came. Pass expect() all "
                f"of the window's micro-batches, or call finish() before the next one."
            )
        return self._rows[index]

    @property
    def totals(self) -> dict[str, Weight]:
        """The window's total weight in each term, over all ranks."""
        if self._totals is None:
            table = self._shared.wait()
            self._totals = dict(zip(self._terms, table.sum(0).unbind(), strict=False))
        return self._totals

    def most_micro_batches(self) -> int:
        """The largest number of micro-batches on one rank; waits for the device."""
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
    """The weights of micro-batches in each term."""
    listed = list(batches)
    if not listed:
        raise TrainkitError(
            "expect(): received no micro-batches, so the window's total is not known. "
            "Pass all that this rank will run. A rank without any runs one of weight 0."
        )
    return {
        term: [on_host(strategy.weight(batch)) for batch in listed]
        for term, strategy in strategies.items()
    }


def on_host(weight: Weight) -> Weight:
    """A checked weight, as a plain number if that needs no waiting for a GPU."""
    if isinstance(weight, Tensor) and weight.is_cpu and weight.numel() == 1:
        weight = weight.item()
    return checked_weight(weight)


def _sum(weights: Sequence[Weight], device: torch.device) -> Weight:
    for weight in weights:
        if isinstance(weight, Tensor):
            return vector(weights, device).sum()
    return math.fsum(cast(Sequence[float], weights))
