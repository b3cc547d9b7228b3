"""Choosing micro-batch and accumulation for an effective batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from trainkit.core.effective import EffectiveBatch
from trainkit.core.epoch_plan import EpochPlan
from trainkit.core.scaling import checked_factor, make_rule
from trainkit.core.whole_number import check_whole_number
from trainkit.errors import TrainkitError

NEARBY = 0.05
"""How far from the target `BatchPlan.nearby` may go, as a share of it."""

MOST_SIZES = 1000
"""How many micro-batch sizes `BatchPlan.nearby` tries; far fewer are enough."""


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """The factors of an effective batch: micro_batch x accumulate x world_size.

    >>> plan = BatchPlan.make(target=512, world_size=4, max_micro_batch=24)
    >>> plan.micro_batch, plan.accumulate, plan.effective, plan.exact
    (16, 8, 512, True)

    Attributes:
        micro_batch: samples that one rank's forward pass sees: its loader's
            `batch_size`.
        accumulate: micro-batches that a rank accumulates: `accumulate_grad_batches`.
        world_size: ranks with data of their own.
        target: the effective batch that was asked for.
        max_micro_batch: the most samples that fit into one rank's forward pass.

    Raises:
        TrainkitError: a number is not whole or below 1, or the micro-batch does not
            fit.
    """

    micro_batch: int
    accumulate: int
    world_size: int
    target: int
    max_micro_batch: int

    def __post_init__(self) -> None:
        for field in fields(self):
            check_whole_number(f"BatchPlan {field.name}", getattr(self, field.name))
        if self.micro_batch > self.max_micro_batch:
            raise TrainkitError(
                f"BatchPlan micro_batch: must be at most max_micro_batch, "
                f"{self.max_micro_batch}, received {self.micro_batch}."
            )

    @classmethod
    def make(
        cls, *, target: int, max_micro_batch: int, world_size: int = 1
    ) -> BatchPlan:
        """The plan with the fewest micro-batches that makes the target.

        If `world_size` divides the target, the plan hits it, even if that takes many
        small micro-batches (see `nearby` for a cheaper plan). Otherwise equal
        micro-batches cannot hit it, and the plan has the nearest effective batch. Of
        two that are equally near, it has the one with fewer micro-batches, then the
        smaller one.

        >>> BatchPlan.make(target=1000, world_size=3, max_micro_batch=24).effective
        999

        Args:
            target: samples that one optimizer step should see, over all ranks.
            max_micro_batch: the most samples that fit into one rank's forward pass.
            world_size: ranks with data of their own.

        Raises:
            TrainkitError: a number is not whole, or below 1.
        """
        check_whole_number("BatchPlan target", target)
        check_whole_number("BatchPlan world_size", world_size)
        check_whole_number("BatchPlan max_micro_batch", max_micro_batch)

        shares = {max(target // world_size, 1), -(-target // world_size)}
        plans = []
        for share in shares:
            accumulate = _fewest_micro_batches(share, max_micro_batch)
            plans.append(
                cls(
                    micro_batch=share // accumulate,
                    accumulate=accumulate,
                    world_size=world_size,
                    target=target,
                    max_micro_batch=max_micro_batch,
                )
            )
        return min(plans, key=_nearest_then_cheapest)

    @property
    def effective(self) -> int:
        """Samples that one optimizer step sees, over all ranks."""
        return self.micro_batch * self.accumulate * self.world_size

    @property
    def exact(self) -> bool:
        """Whether the effective batch equals the target."""
        return self.effective == self.target

    @property
    def effective_batch(self) -> EffectiveBatch:
        """The plan's effective batch, as an `EffectiveBatch`."""
        return EffectiveBatch(
            micro_batch=self.micro_batch,
            accumulate=self.accumulate,
            replicas=self.world_size,
        )

    def nearby(self) -> BatchPlan | None:
        """A plan within 5 % of the target in at most half the micro-batches, or None.

        A rank's share of the target may have only small divisors or be prime, and the
        micro-batches are then very small. This is the plan without the exact target:
        its micro-batches are more than half of what fits, and it is the nearest to the
        target of these. Of two that are equally near, it has fewer micro-batches.

        >>> plan = BatchPlan.make(target=127, max_micro_batch=24)
        >>> plan.accumulate
        127
        >>> near = plan.nearby()
        >>> near.micro_batch, near.accumulate, near.effective
        (21, 6, 126)
        """
        largest = min(self.max_micro_batch, -(-self.target // self.world_size))
        smallest = max(largest // 2, largest - MOST_SIZES)
        plans = [
            replace(self, micro_batch=micro_batch, accumulate=accumulate)
            for micro_batch in range(largest, smallest, -1)
            for below in [self.target // (micro_batch * self.world_size)]
            for accumulate in (below, below + 1)
            if 1 <= accumulate <= self.accumulate // 2
        ]
        best = min(plans, key=_nearest_then_cheapest, default=None)
        if best is None or abs(best.effective - self.target) > NEARBY * self.target:
            return None
        return best

    def epoch(self, num_samples: int, *, drop_last: bool = False) -> EpochPlan:
        """The plan of an epoch over a data set; see `EpochPlan.make`."""
        return EpochPlan.make(
            num_samples,
            micro_batch=self.micro_batch,
            accumulate=self.accumulate,
            world_size=self.world_size,
            drop_last=drop_last,
        )

    def scaled_rate(
        self,
        lr: float,
        *,
        reference_batch: float,
        rule: str | Callable[[float], float],
    ) -> float:
        """A learning rate that was found for another batch, scaled to this batch.

        >>> plan = BatchPlan.make(target=512, world_size=4, max_micro_batch=24)
        >>> plan.scaled_rate(0.1, reference_batch=256, rule="linear")
        0.2

        Args:
            lr: the rate for the reference batch.
            reference_batch: the batch for which it was found.
            rule: a rule's name or a callable, as for `LRScaling`. Not `"auto"` or
                `"gain"`, which need the optimizer.

        Raises:
            TrainkitError: there is no such rule, or `reference_batch` is not positive.
        """
        found = make_rule(rule)
        if found is None:
            raise TrainkitError(
                f"BatchPlan.scaled_rate rule: {rule!r} asks the optimizer, and a plan "
                f"does not have one. Name the rule: 'linear' for SGD, 'sqrt' for the "
                f"Adam family; or give a callable of k."
            )
        k = self.effective_batch.over(reference_batch)
        return lr * checked_factor(found.name, found.lr, k)


def _fewest_micro_batches(share: int, largest: int) -> int:
    """The smallest divisor of `share` that cuts it into parts of at most `largest`.

    >>> [_fewest_micro_batches(share, 24) for share in (128, 127, 24, 25, 1)]
    [8, 127, 1, 5, 1]
    """
    fewest = share  # parts of one sample
    for divisor in range(1, math.isqrt(share) + 1):
        if share % divisor == 0:
            if share // divisor <= largest:
                return divisor
            if divisor <= largest:
                fewest = share // divisor
    return fewest


def _nearest_then_cheapest(plan: BatchPlan) -> tuple[int, int, int]:
    return abs(plan.effective - plan.target), plan.accumulate, plan.effective
