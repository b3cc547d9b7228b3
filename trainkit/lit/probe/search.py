"""The order in which sizes are tried."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainkit.core.plan.effective_batch import BatchPlan


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The result of one size of a micro-batch.

    Attributes:
        size: rows of one rank's micro-batch.
        fits: whether it fits, with the margin, on every rank.
        peak_bytes: the most memory that a rank's device had allocated, if known.
    """

    size: int
    fits: bool
    peak_bytes: int | None = None

    def __str__(self) -> str:
        """
        >>> str(Trial(size=8, fits=True, peak_bytes=2**30))
        'fits, 1.0 GiB at most'
        """
        if not self.fits:
            return "does not fit"
        if self.peak_bytes is None:
            return "fits"
        return f"fits, {self.peak_bytes / 2**30:,.1f} GiB at most"


def sizes_for(*, target: int, world_size: int, largest: int) -> list[int]:
    """All micro-batches that a `BatchPlan` for this target could have, smallest first.

    >>> sizes_for(target=96, world_size=4, largest=12)
    [1, 2, 3, 4, 6, 8, 12]
    """
    sizes: list[int] = []
    while largest > 0:
        plan = BatchPlan.make(
            target=target, world_size=world_size, max_micro_batch=largest
        )
        sizes.insert(0, plan.micro_batch)
        largest = plan.micro_batch - 1  # the plan of all sizes between them, too
    return sizes


def search(sizes: Sequence[int], attempt: Callable[[int], Trial]) -> list[Trial]:
    """Bisect until the largest size that fits is known, and the next one does not.

    Args:
        sizes: the sizes that may be chosen, smallest first.
        attempt: tries one size.

    Returns:
        The sizes that were tried, smallest first.
    """
    low, high, tried = -1, len(sizes), list[Trial]()
    while low + 1 < high:
        middle = (low + high) // 2
        tried.append(attempt(sizes[middle]))
        if tried[-1].fits:
            low = middle
        else:
            high = middle
    return sorted(tried, key=lambda trial: trial.size)
