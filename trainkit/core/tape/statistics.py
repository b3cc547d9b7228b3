"""The statistics of a BatchNorm layer over all chunks, and what follows from them.

What crosses between chunks and ranks is a number of entries, a mean and a sum of
squared deviations for each channel: 2C + 1 numbers forward, 2C backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from trainkit.core.gradients import HALF
from trainkit.core.ranks import Ranks
from trainkit.errors import TrainkitError


def ranks_of(process_group: Any = None) -> Ranks:
    """All ranks of a group; of the default one where none is given."""
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks()
    size, index = dist.get_world_size(process_group), dist.get_rank(process_group)
    return Ranks(group=process_group, size=size, index=index)


def partial(x: Tensor) -> Tensor:
    """The number of entries of a channel, their means and sums of squared deviations.

    Args:
        x: what a chunk brings to the layer, channels in dimension 1.
    """
    wide, count = x.detach(), x.numel() // max(x.shape[1], 1)
    wide = wide.float() if wide.dtype in HALF else wide
    if not count:
        return wide.new_zeros(1 + 2 * x.shape[1])
    mean, var = torch.batch_norm_update_stats(wide, None, None, 0.0)
    return torch.cat([mean.new_full((1,), count), mean, var * count])


def _joined(table: Tensor) -> Tensor:
    """Rows of counts, means and squared deviations as one row, by Chan's formula.

    Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing
    sample variances" (1979): M2 = sum_i M2_i + sum_i n_i (mean_i - mean)^2.
    """
    num = (table.shape[1] - 1) // 2
    counts, means, squares = table[:, :1], table[:, 1 : num + 1], table[:, num + 1 :]
    count = counts.sum()
    mean = (counts * means).sum(0) / count.clamp(min=1)
    squares = squares.sum(0) + (counts * (means - mean).square()).sum(0)
    return torch.cat([count.view(1), mean, squares])


@dataclass
class Normal:
    """One call of a BatchNorm layer, whose statistics are known.

    A single row is made contiguous, and so is its gradient: from strides such as
    (5, 1, 25, 5) torch's kernel for CPUs computes another gradient (seen with 2.13).

    Attributes:
        mean: of each channel, over all rows.
        var: of each channel, divided by the number of entries.
        count: the entries of a channel, on all ranks.
        eps: of the layer.
        ranks: that share the statistics.
    """

    mean: Tensor
    var: Tensor
    count: Tensor
    eps: float
    ranks: Ranks

    @classmethod
    def of(cls, parts: Sequence[Tensor], entries: int, eps: float, ranks: Ranks) -> Any:
        """The statistics of all chunks on all ranks.

        Args:
            parts: what `partial` makes of each chunk of this rank.
            entries: of a channel, in all of them.
            eps: of the layer.
            ranks: that share the statistics.
        """
        table = torch.stack(list(parts))
        if ranks.size > 1:
            # One row for each rank, in one all-reduce.
            table = ranks.gather_rows(_joined(table)).wait()
        elif entries < 2:
            raise TrainkitError(
                f"exact BatchNorm: BatchNorm expects more than 1 value per channel "
                f"when training, and the whole batch has {entries}. Give it more rows."
            )
        whole = _joined(table)
        count, num = whole[0], (len(whole) - 1) // 2
        return cls(whole[1 : num + 1], whole[num + 1 :] / count, count, eps, ranks)

    def move(self, running: tuple[Tensor, Tensor], momentum: float) -> None:
        """Move running statistics by one batch, as torch does."""
        unbiased = self.var * (self.count / (self.count - 1))
        for old, new in zip(running, (self.mean, unbiased), strict=True):
            old.copy_(old + momentum * (new.to(old.dtype) - old))

    def weights(self, weight: Tensor | None, bias: Tensor | None) -> list[Tensor]:
        """Weight and bias in the statistics' type; ones and zeros where a layer has
        none. Their gradients are the sums of dy * xhat, S2, and of dy, S1."""
        ones, zeros = torch.ones_like(self.mean), torch.zeros_like(self.mean)
        pair = ones if weight is None else weight, zeros if bias is None else bias
        return [each.detach().to(self.mean.dtype) for each in pair]

    def __call__(self, x: Tensor, leaves: Sequence[Tensor]) -> Tensor:
        """Normalise a chunk; autograd takes the statistics for constants."""
        is_one = x.shape[0] == 1
        x, (weight, bias) = x.contiguous() if is_one else x, leaves
        out = F.batch_norm(x, self.mean, self.var, weight, bias, False, 0.0, self.eps)
        if out.requires_grad and is_one:
            out.register_hook(Tensor.contiguous)
        return out

    def correction(self, weight: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Weight and bias with which `x`, normalised, is what a gradient lacks that
        takes the statistics for constants.

            dx = w / sigma * (dy - S1 / N - xhat * S2 / N)

        Args:
            weight: of the layer.
            sums: S2 over all rows of all ranks, and below it S1.
        """
        scale = weight * torch.rsqrt(self.var + self.eps) / self.count
        lacking = -scale * sums
        return lacking[0], lacking[1]
