"""The effective batch, how to make one, and the steps of an epoch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

from trainkit.core.plan.options import (
    brief,
    check_choice,
    check_size,
    check_whole_number,
    check_whole_numbers,
)
from trainkit.errors import TrainkitError

Unit = Literal["samples", "tokens"]


@dataclass(frozen=True, kw_only=True)
class EffectiveBatch:
    """What one optimizer step sees: micro-batch x accumulation x replicas.

    >>> batch = EffectiveBatch(micro_batch=8, accumulate=4, replicas=2)
    >>> batch.size, batch.over(32)
    (64, 2.0)
    >>> print(batch)
    per-device batch 8 x accumulation 4 x ranks 2 = 64 samples a step

    Attributes:
        micro_batch: samples or tokens that one replica's forward pass sees, on average.
        accumulate: how many micro-batches a replica accumulates.
        replicas: how many ranks have data of their own. Ranks that share one replica
            (tensor parallelism) count once.
        unit: what is counted.
    """

    micro_batch: float
    accumulate: int = 1
    replicas: int = 1
    unit: Unit = "samples"

    def __post_init__(self) -> None:
        check_unit("EffectiveBatch", self.unit)
        check_size("EffectiveBatch micro_batch", self.micro_batch)
        check_whole_numbers(
            "EffectiveBatch", accumulate=self.accumulate, replicas=self.replicas
        )

    @property
    def size(self) -> float:
        """How many samples or tokens one optimizer step sees."""
        return self.micro_batch * self.accumulate * self.replicas

    def over(self, reference_batch: float) -> float:
        """k, the ratio of this batch to another one."""
        check_size("reference_batch", reference_batch)
        return self.size / reference_batch

    def __str__(self) -> str:
        return (
            f"per-device batch {brief(self.micro_batch)} x accumulation "
            f"{int(self.accumulate)} x ranks {self.replicas} = {brief(self.size)} "
            f"{self.unit} a step"
        )


def check_unit(owner: str, unit: str) -> None:
    """Refuse a unit of batches that is not known."""
    check_choice(f"{owner} unit", unit, get_args(Unit))


class Epoch(NamedTuple):
    """The optimizer steps of an epoch over a data set of known length.

    Attributes:
        num_steps: optimizer steps.
        num_micro_batches: micro-batches of one rank.
        last_window_samples: samples in the last window, over all ranks.
        is_short: whether the last window has fewer samples than the effective batch.
    """

    num_steps: int
    num_micro_batches: int
    last_window_samples: int
    is_short: bool


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
    """

    micro_batch: int
    accumulate: int
    world_size: int
    target: int
    max_micro_batch: int

    def __post_init__(self) -> None:
        check_whole_numbers("BatchPlan", **vars(self))
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
        small micro-batches: a target with more divisors needs fewer. Otherwise equal
        micro-batches cannot hit it, and the plan has the nearest effective batch. Of
        two that are equally near, it has the one with fewer micro-batches, then the
        smaller one.

        >>> BatchPlan.make(target=1000, world_size=3, max_micro_batch=24).effective
        999
        """
        smallest = cls(
            micro_batch=1,
            accumulate=1,
            world_size=world_size,
            target=target,
            max_micro_batch=max_micro_batch,
        )
        plans = [
            replace(smallest, micro_batch=share // parts, accumulate=parts)
            for share in {max(target // world_size, 1), -(-target // world_size)}
            for parts in _divisors(share)
            if share // parts <= max_micro_batch
        ]
        return min(plans, key=_nearest_then_cheapest)

    @property
    def effective(self) -> int:
        """Samples that one optimizer step sees, over all ranks."""
        return self.micro_batch * self.accumulate * self.world_size

    @property
    def exact(self) -> bool:
        """Whether the effective batch equals the target."""
        return self.effective == self.target

    def epoch(self, num_samples: int) -> Epoch:
        """The steps of an epoch over a data set of so many samples.

        It counts as torch's `DistributedSampler` and Lightning do: every rank gets an
        equal number of samples, and some samples are read twice to make that possible.
        The end of an epoch closes the open window, however short it is.

        >>> plan = BatchPlan.make(target=512, world_size=4, max_micro_batch=24)
        >>> plan.epoch(1000)
        Epoch(num_steps=2, num_micro_batches=16, last_window_samples=488, is_short=True)
        """
        check_whole_number("BatchPlan.epoch num_samples", num_samples)
        per_rank = -(-num_samples // self.world_size)
        num_micro_batches = -(-per_rank // self.micro_batch)
        num_steps = -(-num_micro_batches // self.accumulate)
        before = (num_steps - 1) * self.accumulate * self.micro_batch
        last = (per_rank - before) * self.world_size
        return Epoch(num_steps, num_micro_batches, last, last < self.effective)


def _divisors(number: int) -> list[int]:
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return [*low, *(number // n for n in low)]


def _nearest_then_cheapest(plan: BatchPlan) -> tuple[int, int, int]:
    return abs(plan.effective - plan.target), plan.accumulate, plan.effective
