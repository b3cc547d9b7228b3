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


class DoesNotFit(Exception):
    """Raised if not even the smallest size fits."""


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


def search(
    sizes: Sequence[int], start: int, attempt: Callable[[int], Trial]
) -> list[Trial]:
    """Try sizes until the largest that fits is known.

    The search begins near `start` and halves the size until one fits. Then it doubles
    the size, and bisects between a size that fits and one that does not.

    Args:
        sizes: the sizes that may be chosen, smallest first.
        start: the search begins with the largest size that is not above this.
        attempt: tries one size.

    Returns:
        The sizes that were tried, smallest first.

    Raises:
        DoesNotFit: the smallest size does not fit.
    """
    low, high = _at_most(sizes, start), len(sizes)
    known = [attempt(sizes[low])]
    while not known[-1].fits:
        if low == 0:
            raise DoesNotFit
        high, low = low, _at_most(sizes, sizes[low] // 2)
        known.append(attempt(sizes[low]))
    while low + 1 < high:
        twice = max(_at_most(sizes, 2 * sizes[low]), low + 1)
        middle = (low + high) // 2 if high < len(sizes) else twice
        known.append(attempt(sizes[middle]))
        if known[-1].fits:
            low = middle
        else:
            high = middle
    return sorted(known, key=lambda trial: trial.size)


def _at_most(sizes: Sequence[int], size: int) -> int:
    """The index of the largest size that is not above another."""
    return max((i for i, each in enumerate(sizes) if each <= size), default=0)
