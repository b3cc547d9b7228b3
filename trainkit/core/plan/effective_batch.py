"""The effective batch, how to make one, and what an epoch of it is."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

from trainkit.core.plan.options import (
    brief,
    check_choice,
    check_size,
    check_whole_numbers,
)
from trainkit.core.plan.scaling import Factor, checked_factor, make_rule
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
        micro_batch: samples or tokens that one replica's forward pass sees; a mean if
            it was measured.
        accumulate: how many micro-batches a replica accumulates.
        replicas: how many ranks have data of their own. Ranks that share one replica
            (tensor parallelism) count once.
        unit: what is counted.
        windows_measured: the number of windows over which `micro_batch` was measured;
            0 if it is known.
    """

    micro_batch: float
    accumulate: int = 1
    replicas: int = 1
    unit: Unit = "samples"
    windows_measured: int = 0

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

    @property
    def is_exact(self) -> bool:
        """Whether the size is known, not measured."""
        return self.windows_measured == 0

    def over(self, reference_batch: float) -> float:
        """k, the ratio of this batch to another one."""
        check_size("reference_batch", reference_batch)
        return self.size / reference_batch

    def __str__(self) -> str:
        measured = ""
        if not self.is_exact:
            several = "s" * (self.windows_measured != 1)
            measured = f" (measured over {self.windows_measured} window{several})"
        return (
            f"per-device batch {brief(self.micro_batch)} x accumulation "
            f"{int(self.accumulate)} x ranks {self.replicas} = {brief(self.size)} "
            f"{self.unit} a step{measured}"
        )


def check_unit(owner: str, unit: str) -> None:
    """Refuse a unit of batches that is not known."""
    check_choice(f"{owner} unit", unit, get_args(Unit))


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

    @property
    def effective_batch(self) -> EffectiveBatch:
        """The plan's effective batch, as an `EffectiveBatch`."""
        return EffectiveBatch(
            micro_batch=self.micro_batch,
            accumulate=self.accumulate,
            replicas=self.world_size,
        )

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
        self, lr: float, *, reference_batch: float, rule: str | Factor
    ) -> float:
        """A learning rate that was found for another batch, scaled to this batch.

        The rule is a name or a callable, as for `LRScaling`; not `"auto"` or `"gain"`,
        which need the optimizer.

        >>> plan = BatchPlan.make(target=512, world_size=4, max_micro_batch=24)
        >>> plan.scaled_rate(0.1, reference_batch=256, rule="linear")
        0.2
        """
        found = make_rule(rule)
        k = self.effective_batch.over(reference_batch)
        return lr * checked_factor(found.name, found.lr, k)


def _divisors(number: int) -> list[int]:
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return [*low, *(number // n for n in low)]


def _nearest_then_cheapest(plan: BatchPlan) -> tuple[int, int, int]:
    return abs(plan.effective - plan.target), plan.accumulate, plan.effective


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """The optimizer steps of an epoch over a data set of known length.

    It counts as torch's `DistributedSampler` and Lightning do: every rank gets an equal
    number of samples, and some samples are read twice to make that possible. The end of
    an epoch closes the open window, however short it is.

    >>> epoch = EpochPlan.make(1000, micro_batch=16, accumulate=8, world_size=4)
    >>> epoch.num_micro_batches, epoch.num_steps
    (16, 2)
    >>> epoch.last_window_micro_batches, epoch.last_window_samples, epoch.is_short
    (8, 488, True)

    Attributes:
        num_samples: samples in the data set.
        samples_per_rank: samples that a rank's sampler yields, with repeated ones.
        num_repeated_samples: samples that are read twice so that ranks are even.
        num_dropped_samples: samples that `drop_last` leaves out, over all ranks.
        num_micro_batches: micro-batches of one rank.
        num_steps: optimizer steps.
        last_window_micro_batches: micro-batches of one rank in the last window.
        last_window_samples: samples in the last window, over all ranks.
        is_short: whether the last window has fewer samples than the effective batch.
    """

    num_samples: int
    samples_per_rank: int
    num_repeated_samples: int
    num_dropped_samples: int
    num_micro_batches: int
    num_steps: int
    last_window_micro_batches: int
    last_window_samples: int
    is_short: bool

    @classmethod
    def make(
        cls,
        num_samples: int,
        *,
        micro_batch: int,
        accumulate: int,
        world_size: int = 1,
        drop_last: bool = False,
    ) -> EpochPlan:
        """Count an epoch in windows as large as those of a `BatchPlan`.

        With `drop_last` the loader leaves out a micro-batch that is not full.
        """
        check_whole_numbers(
            "EpochPlan",
            num_samples=num_samples,
            micro_batch=micro_batch,
            accumulate=accumulate,
            world_size=world_size,
        )
        per_rank = -(-num_samples // world_size)
        dropped = per_rank % micro_batch if drop_last else 0
        used = per_rank - dropped
        if used == 0:
            raise TrainkitError(
                f"EpochPlan drop_last: leaves nothing of {num_samples} samples: a "
                f"rank has {per_rank}, fewer than its micro-batch of {micro_batch}. "
                f"Use a smaller micro-batch, or keep the last one."
            )
        num_micro_batches = -(-used // micro_batch)
        num_steps = -(-num_micro_batches // accumulate)
        before = (num_steps - 1) * accumulate  # micro-batches before the last window
        last = used - before * micro_batch
        return cls(
            num_samples=num_samples,
            samples_per_rank=per_rank,
            num_repeated_samples=per_rank * world_size - num_samples,
            num_dropped_samples=dropped * world_size,
            num_micro_batches=num_micro_batches,
            num_steps=num_steps,
            last_window_micro_batches=num_micro_batches - before,
            last_window_samples=last * world_size,
            is_short=last < accumulate * micro_batch,
        )
