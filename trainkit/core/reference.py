"""r, the number by which weights are divided while a window is open."""

from __future__ import annotations

import torch
from torch import Tensor

from trainkit.core.ranks import Ranks
from trainkit.core.strategies import Weight
from trainkit.core.totals import scalar

HEADROOM = 256
"""Under a gradient scaler, how much heavier a run's first window may be than its first
micro-batch lets expect before half precision overflows and a step is lost."""

UNKNOWN = 1024.0
"""r where the first micro-batch weighs nothing, and so tells nothing: in half precision
a window may then weigh from a thousandth of this to ten thousand times as much."""


class Reference:
    """One number that all ranks share, near what a window weighs on one rank.

    Gradients are added as w_i / r, so that their sum stays near the size of a mean
    gradient whatever the weights are: half precision neither overflows nor vanishes.
    The division that closes a window takes r out again. It is a power of two, so that
    w / r is exact where w is.

    Args:
        ranks: those that must agree on it.
        has_scaler: whether an overflow costs a step.
    """

    def __init__(self, ranks: Ranks, *, has_scaler: bool) -> None:
        self._ranks = ranks
        self._headroom = HEADROOM if has_scaler else 1
        self._inverses: dict[int, Tensor] = {}
        self.value: Tensor | None = None

    def set(self, value: Tensor | None) -> None:
        self.value = value
        self._inverses = {}

    def inverse(self, divided_by: int) -> Tensor:
        """divided_by / r."""
        if divided_by not in self._inverses:
            assert self.value is not None
            self._inverses[divided_by] = divided_by / self.value
        return self._inverses[divided_by]

    def agree(self, weight: Weight, expected: int, device: torch.device) -> None:
        """The first window's, from its first micro-batches.

        Later windows take an earlier one's weight, which all ranks know. Where
        backward passes communicate, every rank comes here in its first one.
        """
        first = scalar(weight, device) * (expected * self._headroom)
        if self._ranks.backend_sums:
            first = self._ranks.sum_(first) / self._ranks.size
        self.set(power_of_two(first, None))

    def follow(self, window: int, weight: Tensor) -> None:
        """Take over a closed window's weight, now and then.

        The size of the sums need not follow every window, but all ranks must change r
        at the same one.
        """
        if window < 8 or window % 16 == 0:
            self.set(power_of_two(weight / self._ranks.size, self.value))


def power_of_two(number: Tensor, before: Tensor | None) -> Tensor:
    """The power of two nearest to a positive number, else what it was before.

    It falls by halves only: the window after an epoch's short last one is a full one.
    """
    nearest = number.log2().round().exp2()
    if before is None:
        return torch.where(nearest > 0, nearest, UNKNOWN)
    before = before.to(number.device)
    return torch.where(nearest > 0, nearest.maximum(before / 2), before)
