"""Windows whose gradient and noise are known: a quadratic loss, drawn sample by sample.

A sample of n tokens contributes n G plus noise of variance n^1.5, which is between
independent tokens (n) and tokens that all say the same (n^2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainkit.core.noise.estimate import NoiseEstimate

DIMENSIONS = 64
LENGTHS = 2.0 ** torch.arange(7, dtype=torch.float64)


@dataclass(frozen=True)
class Setting:
    """A kind of window.

    Attributes:
        micro_batches: in a window, on all ranks.
        samples: in a micro-batch.
        ratio: the noise scale over the window.
        is_ragged: whether samples have 1, 2, 4 ... or 64 tokens; else one.
    """

    micro_batches: int
    samples: int
    ratio: float
    is_ragged: bool

    @property
    def noise_scale(self) -> float:
        return self.ratio * self.micro_batches * self.samples

    def windows(self, number: int, seed: int) -> Tensor:
        """The sums of so many windows."""
        generator = torch.Generator().manual_seed(seed)
        shape = number, self.micro_batches, self.samples
        lengths = torch.ones(shape, dtype=torch.float64)
        mean = noise = 1.0
        if self.is_ragged:
            lengths = LENGTHS[torch.randint(len(LENGTHS), shape, generator=generator)]
            mean, noise = float(LENGTHS.mean()), float((LENGTHS**1.5).mean())
        # T = noise_scale * mean^2 * |G|^2, with |G| = 1
        variance = self.noise_scale * mean**2 / noise / DIMENSIONS
        weights = lengths.sum(-1)
        spread = ((lengths**1.5).sum(-1) * variance).sqrt()
        contributions = spread[..., None] * torch.randn(
            *shape[:2], DIMENSIONS, generator=generator, dtype=torch.float64
        )
        contributions[..., 0] += weights
        columns = [
            contributions.sum(1).square().sum(-1),
            contributions.square().sum((-1, -2)),
            weights.sum(-1).square(),
            weights.square().sum(-1),
            weights.sum(-1),
            torch.full((number,), shape[1] * shape[2]).double(),
            torch.ones(number).double(),
        ]
        return torch.stack(columns, -1)


def as_if_equal(windows: Tensor, micro_batches: int) -> Tensor:
    """The sums by the formula for equal micro-batches, as in fairscale and AdaptDL."""
    equal = windows.clone()
    equal[:, 3] = windows[:, 2] / micro_batches
    return equal


def estimate_of(windows: Tensor) -> NoiseEstimate | None:
    return NoiseEstimate.of(windows.tolist())
