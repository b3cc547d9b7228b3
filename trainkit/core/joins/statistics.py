"""The statistics of a BatchNorm layer over a whole window, and what follows from them.

What crosses between micro-batches and ranks is a number of entries, a mean and a sum of
squared deviations for each channel: 2C + 1 numbers forward, 2C backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trainkit.core.batch_norm.layers import BatchNorm
from trainkit.core.gradients import HALF
from trainkit.core.ranks import Ranks
from trainkit.errors import TrainkitError


@dataclass(frozen=True)
class Statistics:
    """The statistics of one call of a layer.

    Attributes:
        mean: of each channel.
        var: of each channel, divided by the number of entries.
        count: the entries of a channel, on all ranks.
    """

    mean: Tensor
    var: Tensor
    count: Tensor


def partial(x: Tensor) -> Tensor:
    """The number of entries of a channel, their means and sums of squared deviations.

    Args:
        x: what a micro-batch brings to the layer, channels in dimension 1.
    """
    wide, count = x.detach(), num_entries(x)
    wide = wide.float() if wide.dtype in HALF else wide
    if not count:
        return wide.new_zeros(1 + 2 * x.shape[1])
    mean, var = torch.batch_norm_update_stats(wide, None, None, 0.0)
    return torch.cat([mean.new_full((1,), count), mean, var * count])


def num_entries(x: Tensor) -> int:
    """How many entries each channel of a tensor has."""
    return x.numel() // max(x.shape[1], 1)


def combined(
    parts: Sequence[Tensor], entries: int, ranks: Ranks, layer: str
) -> Statistics:
    """The statistics of all micro-batches on all ranks together, by Chan's formula.

    Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing
    sample variances" (1979): M2 = sum_i M2_i + sum_i n_i (mean_i - mean)^2.

    Args:
        parts: of the micro-batches of this rank.
        entries: of a channel, in all of them.
        ranks: that share the statistics.
        layer: the name of the layer, for messages.
    """
    table = torch.stack(list(parts))
    if ranks.size > 1:
        # One row for each rank, in one all-reduce.
        table = ranks.gather_rows(_joined(table)).wait()
    elif entries < 2:
        raise TrainkitError(
            f"{layer}: BatchNorm expects more than 1 value per channel when training, "
            f"and the whole window has {entries}. Give it more rows."
        )
    whole = _joined(table)
    count, num = whole[0], (len(whole) - 1) // 2
    return Statistics(whole[1 : num + 1], whole[num + 1 :] / count, count)


def _joined(table: Tensor) -> Tensor:
    """Rows of counts, means and squared deviations as one row."""
    num = (table.shape[1] - 1) // 2
    counts, means, squares = table[:, :1], table[:, 1 : num + 1], table[:, num + 1 :]
    count = counts.sum()
    mean = (counts * means).sum(0) / count
    squares = squares.sum(0) + (counts * (means - mean).square()).sum(0)
    return torch.cat([count.view(1), mean, squares])


def move_running(layer: BatchNorm, statistics: Statistics) -> None:
    """Move a layer's running statistics by one batch, as the layer itself does."""
    if layer.running_mean is None or not (layer.training and layer.track_running_stats):
        return
    factor: Tensor | float = layer.momentum or 0.0
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if layer.momentum is None:
            factor = 1 / layer.num_batches_tracked.to(layer.running_mean.dtype)
    count = statistics.count
    unbiased = statistics.var * (count / (count - 1))
    for running, new in (
        (layer.running_mean, statistics.mean),
        (layer.running_var, unbiased),
    ):
        assert running is not None
        running.copy_(running + factor * (new.to(running.dtype) - running))


@dataclass(frozen=True)
class Normal:
    """One call of a layer, whose statistics are known.

    A single row is made contiguous, and so is its gradient: from strides such as
    (5, 1, 25, 5) torch's kernel for CPUs computes another gradient (seen with 2.13).

    Attributes:
        statistics: of all its entries.
        weight: of the layer; ones, if it has none.
        bias: of the layer; zeros, if it has none.
        eps: of the layer.
    """

    statistics: Statistics
    weight: Tensor
    bias: Tensor
    eps: float

    @classmethod
    def of(cls, layer: BatchNorm, statistics: Statistics) -> Normal:
        """A call of a layer, with copies of its weights from which gradients begin."""
        like = statistics.mean
        weight = torch.ones_like(like) if layer.weight is None else layer.weight
        bias = torch.zeros_like(like) if layer.bias is None else layer.bias
        weight, bias = (each.detach().to(like.dtype) for each in (weight, bias))
        return cls(statistics, weight, bias, layer.eps)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise what a micro-batch brings; autograd takes the statistics for
        constants, as they are here."""
        mean, var = self.statistics.mean, self.statistics.var
        out = F.batch_norm(
            x.contiguous() if x.shape[0] == 1 else x,
            mean,
            var,
            self.weight,
            self.bias,
            False,
            0.0,
            self.eps,
        )
        if out.requires_grad and x.shape[0] == 1:
            out.register_hook(Tensor.contiguous)
        return out

    def correction(self, x: Tensor, sums: Tensor) -> Tensor:
        """What a gradient lacks that takes the statistics for constants.

            dx = w / sigma * (dy - S1 / N - xhat * S2 / N)

        Args:
            x: what a micro-batch brought.
            sums: the sum of dy * xhat over the window, S2, and below it that of dy, S1.
        """
        mean, var = self.statistics.mean, self.statistics.var
        scale = self.weight * torch.rsqrt(var + self.eps) / self.statistics.count
        weight, bias = -scale * sums
        return F.batch_norm(x, mean, var, weight, bias, False, 0.0, self.eps)

    def backward(self, gradient: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient of `x` with the statistics for constants, then the sums of
        dy * xhat and of dy: the gradients of weight and bias."""
        mean, var = self.statistics.mean, self.statistics.var
        if not x.numel():  # the kernel would divide by zero
            return gradient, torch.zeros_like(mean), torch.zeros_like(mean)
        if x.shape[0] == 1:
            gradient, x = gradient.contiguous(), x.contiguous()
        return torch.ops.aten.native_batch_norm_backward(
            gradient,
            x,
            self.weight,
            mean,
            var,
            None,
            None,
            False,
            self.eps,
            [True, True, True],
        )
