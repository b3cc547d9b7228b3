"""A curve of learning rates that torch lacks: a warm-up, then a cosine."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from trainkit.core.plan.options import check_whole_number
from trainkit.errors import TrainkitError


@dataclass(frozen=True)
class WarmupCosine:
    """The rate at a step, as a share of the largest rate.

        (step + 1) / warmup_steps                         during the warm-up
        final + (1 - final) (1 + cos(pi progress)) / 2    after it, to the end

    >>> curve = WarmupCosine(total_steps=10, warmup_steps=2, final=0.1)
    >>> [round(curve(step), 2) for step in (0, 1, 2, 6, 10, 11)]
    [0.5, 1.0, 1.0, 0.55, 0.1, 0.1]
    """

    total_steps: int
    warmup_steps: int
    final: float

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        left = max(self.total_steps - self.warmup_steps, 1)
        progress = min((step - self.warmup_steps) / left, 1.0)
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * progress)) / 2


def warmup_cosine(
    optimizer: Optimizer, *, total_steps: int, warmup: float = 0.0, final: float = 0.0
) -> LambdaLR:
    """A scheduler for `interval="step"` (Loshchilov and Hutter 2017, with a warm-up).

    Args:
        optimizer: its rates are the largest of the curve.
        total_steps: optimizer steps of the training, with the warm-up.
        warmup: the share of these steps in which the rate rises.
        final: the last rate, as a share of the largest.
    """
    hint = "It is the number of optimizer steps of the whole training."
    check_whole_number("warmup_cosine total_steps", total_steps, hint=hint)
    for name, share in (("warmup", warmup), ("final", final)):
        if not 0 <= share <= 1:
            raise TrainkitError(
                f"warmup_cosine {name}: must lie in 0 to 1, received {share}. It is a "
                f"share of the {'steps' if name == 'warmup' else 'largest rate'}."
            )
    curve = WarmupCosine(total_steps, round(warmup * total_steps), final)
    return LambdaLR(optimizer, curve)
