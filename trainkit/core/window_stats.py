"""The numbers of a closed window, over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from trainkit.core.strategies import LossReduction, Weight

# The columns of a rank's row. The single weights follow them, if they were asked for.
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


def vector(numbers: Sequence[Weight], device: torch.device) -> Tensor:
    """Numbers and 0-d tensors as one float64 vector; does not wait for any of them."""
    dtype = totals_dtype(device)
    devices = {n.device if isinstance(n, Tensor) else None for n in numbers}
    if len(devices) > 1:
        return torch.stack([scalar(number, device) for number in numbers])
    if numbers and None not in devices:
        return torch.stack(cast(list[Tensor], numbers)).to(device, dtype)
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=dtype, device=device)
    host = torch.tensor(numbers, dtype=dtype, pin_memory=True)
    return host.to(device, non_blocking=True)


def scalar(number: Weight, device: torch.device) -> Tensor:
    """A number as a float64 0-d tensor, filled on the device rather than copied."""
    dtype = totals_dtype(device)
    if isinstance(number, Tensor):
        return number.detach().reshape(()).to(device, dtype)
    return torch.full((), number, dtype=dtype, device=device)


def totals_dtype(device: torch.device) -> torch.dtype:
    """float64, which counts exactly to 2^53; float32 on Apple's GPUs, which lack it."""
    return torch.float32 if device.type == "mps" else torch.float64


def default_device() -> torch.device:
    """The device for exchanges between ranks, if nothing else shows one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True, eq=False)
class WindowStats:
    """The loss, weights and counts of a window, over all ranks.

    The ranks exchanged them when the window closed. They are 0-d tensors on the device:
    reading one never communicates, and only turning it into a Python number waits.
    """

    table: Tensor
    """One row for each rank."""

    totals: Tensor
    """The table's sums over ranks."""

    reduction: LossReduction = "mean"
    """What the losses are; a `"total"` is not divided."""

    def on_host(self) -> WindowStats:
        """A copy on the host; waits for the device."""
        return WindowStats(self.table.cpu(), self.totals.cpu(), self.reduction)

    @property
    def weight(self) -> Tensor:
        """The effective batch: the sum of all weights, in float64."""
        return self.totals[WEIGHT]

    @property
    def num_micro_batches(self) -> Tensor:
        """How many micro-batches ran, on all ranks."""
        return self.totals[COUNT].long()

    @property
    def loss(self) -> Tensor:
        """The loss of the window as one batch: its mean, or 0 if it weighs nothing.

        With `loss_reduction="total"` it is the sum.
        """
        if self.reduction == "total":
            return self.totals[LOSS]
        weight = self.weight
        return torch.where(weight == 0, 0, self.totals[LOSS] / weight)

    @property
    def imbalance(self) -> Tensor:
        """The largest weight over the mean weight: 1 if all micro-batches are alike."""
        largest = self.table[:, LARGEST].amax()
        return largest * self.totals[COUNT] / self.weight

    @property
    def padding(self) -> Tensor:
        """The share of tokens that are padding; NaN if they were not counted."""
        return self.totals[PADDING] / self.totals[TOKENS]

    @property
    def samples(self) -> Tensor:
        """How many samples the window had; 0 if they were not counted."""
        return self.totals[SAMPLES]

    @property
    def weights(self) -> Tensor | None:
        """The weight of each micro-batch, on all ranks; None if they were not kept."""
        if self.table.shape[1] == NUM_COLUMNS:
            return None
        single = self.table[:, NUM_COLUMNS:].flatten()
        return single[~single.isnan()]

    @property
    def uniform_gap(self) -> Tensor | None:
        """The distance between uniform averaging and the true weights.

        It is the total variation 1/2 sum_i |w_i / W - 1/n|: the share of the gradient
        that would have gone to the wrong micro-batches. None if single weights were not
        kept; NaN if some are missing (in a window that a checkpoint brought back).
        """
        if self.table.shape[1] == NUM_COLUMNS:
            return None
        single = self.table[:, NUM_COLUMNS:]
        gap = (single / self.weight - 1 / self.totals[COUNT]).abs().nansum() / 2
        kept_all = (~single.isnan()).sum() == self.totals[COUNT]
        return torch.where(kept_all, gap, torch.nan)
