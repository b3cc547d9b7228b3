"""Counting an epoch: its optimizer steps, and how short its last window is."""

from __future__ import annotations

from dataclasses import dataclass

from trainkit.core.whole_number import check_whole_number
from trainkit.errors import TrainkitError


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
        is_short: whether the last window has fewer samples than the effective batch
            (then it steps by fewer samples).
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
        """Count an epoch.

        Args:
            num_samples: samples in the data set.
            micro_batch: samples in a full micro-batch of one rank.
            accumulate: micro-batches in a full window of one rank.
            world_size: ranks with data of their own.
            drop_last: whether the loader leaves out a micro-batch that is not full.

        Raises:
            TrainkitError: a number is not whole, or `drop_last` leaves nothing.
        """
        for name, value in (
            ("num_samples", num_samples),
            ("micro_batch", micro_batch),
            ("accumulate", accumulate),
            ("world_size", world_size),
        ):
            check_whole_number(f"EpochPlan {name}", value)
        samples_per_rank = -(-num_samples // world_size)
        samples_used = samples_per_rank
        if drop_last:
            samples_used -= samples_per_rank % micro_batch
        if samples_used == 0:
            raise TrainkitError(
                f"EpochPlan drop_last: leaves nothing of {num_samples} samples: a "
                f"rank has {samples_per_rank}, fewer than its micro-batch of "
                f"{micro_batch}. Use a smaller micro-batch, or keep the last one."
            )
        num_micro_batches = -(-samples_used // micro_batch)
        num_steps = -(-num_micro_batches // accumulate)
        whole_windows = num_steps - 1
        last_samples = samples_used - whole_windows * accumulate * micro_batch
        return cls(
            num_samples=num_samples,
            samples_per_rank=samples_per_rank,
            num_repeated_samples=samples_per_rank * world_size - num_samples,
            num_dropped_samples=(samples_per_rank - samples_used) * world_size,
            num_micro_batches=num_micro_batches,
            num_steps=num_steps,
            last_window_micro_batches=num_micro_batches - whole_windows * accumulate,
            last_window_samples=last_samples * world_size,
            is_short=last_samples < accumulate * micro_batch,
        )
