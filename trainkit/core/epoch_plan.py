"""What an epoch is: how many optimizer steps, and how short the last window."""

from __future__ import annotations

from dataclasses import dataclass

from trainkit.core.whole_number import check_whole_number
from trainkit.errors import TrainkitError


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """The optimizer steps of an epoch over a data set of known length.

    It counts as torch's `DistributedSampler` and Lightning do: every rank gets the same
    number of samples, and where they do not come out even some are given twice. An
    epoch's end closes the window that is open, however short.

    >>> epoch = EpochPlan.make(1000, micro_batch=16, accumulate=8, world_size=4)
    >>> epoch.num_micro_batches, epoch.num_steps
    (16, 2)
    >>> epoch.last_window_micro_batches, epoch.last_window_samples, epoch.is_short
    (8, 488, True)

    Attributes:
        num_samples: in the data set.
        samples_per_rank: that a rank's sampler yields, repeated ones included.
        num_repeated_samples: how many samples are seen twice so that ranks are even.
        num_dropped_samples: how many samples `drop_last` leaves out, over all ranks.
        num_micro_batches: of one rank.
        num_steps: optimizer steps.
        last_window_micro_batches: of one rank, in the epoch's last window.
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
        """Count an epoch.

        Args:
            num_samples: in the data set.
            micro_batch: samples in a full micro-batch of one rank.
            accumulate: micro-batches in a full window of one rank.
            world_size: ranks with data of their own.
            drop_last: whether the loader leaves out a micro-batch that is not full.

        Raises:
            TrainkitError: a number is not whole, or `drop_last` leaves nothing.
        """
        check_whole_number("EpochPlan num_samples", num_samples)
        check_whole_number("EpochPlan micro_batch", micro_batch)
        check_whole_number("EpochPlan accumulate", accumulate)
        check_whole_number("EpochPlan world_size", world_size)
        samples_per_rank = _ceil(num_samples, world_size)
        samples_used = samples_per_rank
        if drop_last:
            samples_used -= samples_per_rank % micro_batch
        if samples_used == 0:
            raise TrainkitError(
                f"EpochPlan drop_last: leaves nothing of {num_samples} samples: a "
                f"rank has {samples_per_rank}, fewer than its micro-batch of "
                f"{micro_batch}. Use a smaller micro-batch, or keep the last one."
            )
        num_micro_batches = _ceil(samples_used, micro_batch)
        num_steps = _ceil(num_micro_batches, accumulate)
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


def _ceil(number: int, divisor: int) -> int:
    """Divided and rounded up, in whole numbers.

    >>> [_ceil(number, 4) for number in (1, 4, 5)]
    [1, 1, 2]
    """
    return -(-number // divisor)
