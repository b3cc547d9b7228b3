"""The statistics of what a BatchNorm layer gets, and how those of parts are joined.

They are one row: the number of entries of a channel, the mean of each channel, and the
sum of each channel's squared deviations from it: 2C + 1 numbers, which cross between
chunks and ranks in the forward pass; 2C in the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainkit.core.gradients import HALF
from trainkit.core.ranks import Ranks
from trainkit.errors import TrainkitError


def statistics_of(x: Tensor) -> Tensor:
    """The statistics of some rows, of which there may be none.

    Args:
        x: what the layer gets, channels in dimension 1.
    """
    wide, count = x.detach(), x.numel() // max(x.shape[1], 1)
    wide = wide.float() if wide.dtype in HALF else wide
    if not count:
        return wide.new_zeros(1 + 2 * x.shape[1])
    if wide.device.type in ("cpu", "cuda"):
        mean, var = torch.batch_norm_update_stats(wide, None, None, 0.0)
    else:
        over = [0, *range(2, wide.ndim)]
        var, mean = torch.var_mean(wide, over, correction=0)
    return torch.cat([mean.new_full((1,), count), mean, var * count])


def joined(table: Tensor) -> Tensor:
    """The statistics of all rows of a table, each of which has those of a part.

    Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing
    sample variances" (1979): M2 = sum_i M2_i + sum_i n_i (mean_i - mean)^2.
    """
    num = (table.shape[1] - 1) // 2
    counts, means, squares = table[:, :1], table[:, 1 : num + 1], table[:, num + 1 :]
    count = counts.sum()
    mean = (counts * means).sum(0) / count.clamp(min=1)
    squares = squares.sum(0) + (counts * (means - mean).square()).sum(0)
    return torch.cat([count.view(1), mean, squares])


def statistics_over(
    parts: Sequence[Tensor], entries: int, ranks: Ranks
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of each channel, and the number of entries, over all chunks on
    all ranks.

    Args:
        parts: the statistics of each chunk of this rank.
        entries: of a channel, in all of them.
        ranks: that share the statistics.
    """
    table = torch.stack(list(parts))
    if ranks.size > 1:
        # One row for each rank, in one all-reduce.
        table = ranks.gather_rows(joined(table))
    elif entries < 2:
        raise TrainkitError(
            f"exact BatchNorm: BatchNorm expects more than 1 value per channel when "
            f"training, and the whole batch has {entries}. Give it more rows."
        )
    whole = joined(table)
    mean, squares = whole[1:].view(2, -1)
    return mean, squares / whole[0], whole[0]


@dataclass(eq=False)
class Meeting:
    """A call of a BatchNorm in training mode, at which all chunks meet.

    A single row is made contiguous, and so is its gradient: from strides such as
    (5, 1, 25, 5) torch's kernel for CPUs computes another gradient (seen with 2.13).

    Attributes:
        x: the slot of what it normalises.
        places: of weight and bias among the shared tensors; None for none.
        modes: in which it runs.
        trains: whether a gradient goes through it.
        mean: of each channel, over all rows.
        var: of each channel, divided by the number of entries.
        count: the entries of a channel, on all ranks.
        eps: of the layer.
        ranks: that share the statistics.
        y: the slot of what it returns.
        weights: weight and bias in the statistics' type; ones and zeros where a layer
            has none. Their gradients are the sums of dy * xhat, S2, and of dy, S1.
    """

    x: int
    places: list[int | None]
    modes: Any
    trains: bool
    mean: Tensor
    var: Tensor
    count: Tensor
    eps: float
    ranks: Ranks
    y: int = -1
    weights: Sequence[Tensor] = ()

    def take(self, weight: Tensor | None, bias: Tensor | None) -> None:
        """Use the weight and bias of a layer."""
        ones, zeros = torch.ones_like(self.mean), torch.zeros_like(self.mean)
        pair = ones if weight is None else weight, zeros if bias is None else bias
        self.weights = [each.detach().to(ones.dtype) for each in pair]

    def move(self, running: Sequence[Tensor], momentum: float) -> None:
        """Move running statistics by one batch, as torch does."""
        unbiased = self.var * (self.count / (self.count - 1))
        for old, new in zip(running, (self.mean, unbiased), strict=True):
            old.copy_(old + momentum * (new.to(old.dtype) - old))

    def normalised(self, x: Tensor, leaves: Sequence[Tensor] | None = None) -> Tensor:
        """Normalise a chunk; autograd takes the statistics for constants."""
        is_one = x.shape[0] == 1
        x, (weight, bias) = x.contiguous() if is_one else x, leaves or self.weights
        out = F.batch_norm(x, self.mean, self.var, weight, bias, False, 0.0, self.eps)
        if out.requires_grad and is_one:
            out.register_hook(Tensor.contiguous)
        return out

    def correction(self, x: Tensor, sums: Tensor) -> Tensor:
        """What the gradient of a chunk lacks that takes the statistics for constants.

            dx = w / sigma * (dy - S1 / N - xhat * S2 / N)

        Args:
            x: the chunk.
            sums: S2 over all rows of all ranks, and below it S1.
        """
        scale = self.weights[0] * torch.rsqrt(self.var + self.eps) / self.count
        weight, bias = -scale * sums
        return F.batch_norm(x, self.mean, self.var, weight, bias, False, 0.0, self.eps)
