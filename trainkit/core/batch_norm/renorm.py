"""Batch Renormalization, which normalises small batches nearly as at inference."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainkit.core.batch_norm.layers import BatchNorm


class BatchRenorm(BatchNorm):
    """BatchNorm with a correction towards its running statistics.

        y = (x - mean) / std * r + d,   r = std / running_std in [1 / r_max, r_max],
        d = (mean - running_mean) / running_std in [-d_max, d_max]

    (Ioffe 2017, arXiv 1702.03275.) r and d are constants for the gradient. Without
    limits, y would equal the output at inference. With r_max = 1 and d_max = 0 it is
    BatchNorm. The limits widen evenly over the first `ramp` forward passes. The input
    may have any shape (N, C, ...).

    Args:
        num_features: the number of channels.
        eps: added to the variance.
        momentum: of the running statistics; None keeps their plain mean.
        affine: whether a weight and a bias are learned.
        r_max: the largest correction of the scale.
        d_max: the largest correction of the mean, in standard deviations.
        ramp: the number of forward passes over which the limits widen.
    """

    # Never None here: it always tracks.
    num_batches_tracked: Tensor  # type: ignore[assignment]
    running_mean: Tensor  # type: ignore[assignment]
    running_var: Tensor  # type: ignore[assignment]

    def __init__(
        self,
        num_features: int,
        *,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        r_max: float = 3.0,
        d_max: float = 5.0,
        ramp: int = 0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, True, device=device, dtype=dtype
        )
        self.r_max, self.d_max, self.ramp = r_max, d_max, ramp

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(
                f"BatchRenorm: must be (N, C, ...), received shape {list(input.shape)}."
            )

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training:
            return F.batch_norm(
                input,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                eps=self.eps,
            )
        # Half precision is not enough for a variance.
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        over = [0, *range(2, x.ndim)]
        var, mean = torch.var_mean(x, over, correction=0)
        r, d = self._corrections(var, mean)
        scale = r * torch.rsqrt(var + self.eps)
        shift = d - mean * scale
        if self.affine:
            scale, shift = scale * self.weight, shift * self.weight + self.bias
        self._track(var, mean, x.numel() // x.shape[1])
        each = [-1, *[1] * (x.ndim - 2)]
        return (x * scale.view(each) + shift.view(each)).to(input.dtype)

    @torch.no_grad()
    def _corrections(self, var: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        running_std = (self.running_var + self.eps).sqrt()
        # On the device, so that counting forward passes never waits.
        seen = self.num_batches_tracked.to(mean.dtype)
        opened = (seen / self.ramp).clamp(max=1) if self.ramp else seen.clamp(max=1)
        r_max, d_max = 1 + opened * (self.r_max - 1), opened * self.d_max
        r = ((var + self.eps).sqrt() / running_std).clamp(1 / r_max, r_max)
        d = ((mean - self.running_mean) / running_std).clamp(-d_max, d_max)
        return r, d

    @torch.no_grad()
    def _track(self, var: Tensor, mean: Tensor, num_values: int) -> None:
        self.num_batches_tracked.add_(1)
        unbiased = var * (num_values / max(num_values - 1, 1))
        momentum = self.momentum
        if momentum is None:
            new = 1 / self.num_batches_tracked.to(mean.dtype)
        else:
            new = torch.full((), momentum, dtype=mean.dtype, device=mean.device)
        self.running_mean.lerp_(mean.to(self.running_mean), new.to(self.running_mean))
        self.running_var.lerp_(unbiased.to(self.running_var), new.to(self.running_var))
