"""The statistics of what a BatchNorm layer gets, and how those of parts are joined.

They are one row: the number of entries of a channel, the mean of each channel, and the
sum of each channel's squared deviations from it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainkit.core.gradients import HALF


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
