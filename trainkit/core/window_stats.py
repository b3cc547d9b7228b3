"""Numbers of a closed window, over all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainkit.core.strategies import LossReduction

# The columns of a rank's row. What follows them are the single weights, if asked for.
COLUMNS = (
    "weight",
    "divisor",
    "loss",
    "bare_loss",
    "smallest",
    "largest",
    "count",
    "padding",
    "tokens",
    "samples",
)
NUM_COLUMNS = len(COLUMNS)
WEIGHT, DIVISOR, LOSS, BARE_LOSS, SMALLEST, LARGEST, COUNT = range(7)
PADDING, TOKENS, SAMPLES = range(7, NUM_COLUMNS)


@dataclass(frozen=True, eq=False)
class WindowStats:
    """Loss, weights and counts of a window, over all ranks.

    Everything in it has been exchanged when the window closed. Its numbers are 0-d
    tensors on the device: reading one never communicates, and nothing waits for it
    until it is turned into a Python number.
    """

    table: Tensor
    """One row for each rank."""

    totals: Tensor
    """The table's sums over ranks."""

    reduction: LossReduction = "mean"
    """What the losses were; a sum that stays a sum is divided by nothing."""

    def on_host(self) -> WindowStats:
        """A copy on the host; waits for the device."""
        return WindowStats(self.table.cpu(), self.totals.cpu(), self.reduction)

    @property
    def weight(self) -> Tensor:
        """The effective batch: all weights together, in float64."""
        return self.totals[WEIGHT]

    @property
    def num_micro_batches(self) -> Tensor:
        """How many micro-batches ran, on all ranks."""
        return self.totals[COUNT].long()

    @property
    def loss(self) -> Tensor:
        """The loss of the window as one batch: its mean, and 0 where nothing counts;
        with `loss_reduction="total"` the sum."""
        if self.reduction == "total":
            return self.totals[LOSS]
        weight = self.weight
        return torch.where(weight == 0, 0, self.totals[LOSS] / weight)

    @property
    def imbalance(self) -> Tensor:
        """The largest share of a micro-batch, times their number: 1 when all weigh
        the same, and never less."""
        largest = self.table[:, LARGEST].amax()
        return largest * self.totals[COUNT] / self.weight

    @property
    def padding(self) -> Tensor:
        """The share of tokens that only pad; NaN where nobody counted."""
        return self.totals[PADDING] / self.totals[TOKENS]

    @property
    def samples(self) -> Tensor:
        """How many samples it had; 0 where nobody counted."""
        return self.totals[SAMPLES]

    @property
    def weights(self) -> Tensor | None:
        """What each micro-batch weighed, on all ranks, if that was kept."""
        if self.table.shape[1] == NUM_COLUMNS:
            return None
        single = self.table[:, NUM_COLUMNS:].flatten()
        return single[~single.isnan()]

    @property
    def uniform_gap(self) -> Tensor | None:
        """How far uniform averaging would have been from the true weights.

        The total variation 1/2 sum_i |w_i / W - 1/n|: the share of the gradient that
        would have gone to the wrong micro-batch. None if single weights were not kept,
        NaN if not all were (a window that a checkpoint brought back).
        """
        if self.table.shape[1] == NUM_COLUMNS:
            return None
        single = self.table[:, NUM_COLUMNS:]
        gap = (single / self.weight - 1 / self.totals[COUNT]).abs().nansum() / 2
        kept_all = (~single.isnan()).sum() == self.totals[COUNT]
        return torch.where(kept_all, gap, torch.nan)
