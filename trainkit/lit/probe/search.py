"""The order in which sizes are tried, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainkit.core.plan.effective_batch import BatchPlan

NOISE = 0.05
"""A larger size is chosen only if it is faster by more than this share."""

PATIENCE = 2
"""The search ends after this many larger sizes in a row that are not faster."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The result of one size of a micro-batch.

    Attributes:
        size: rows of one rank's micro-batch.
        fits: whether it fits, with the margin, on every rank.
        samples_per_second: the samples of one rank, at the pace of the slowest rank;
            None if the size does not fit.
        peak_bytes: the most memory that a rank's device had allocated, if known.
    """

    size: int
    fits: bool
    samples_per_second: float | None = None
    peak_bytes: int | None = None

    def __str__(self) -> str:
        """
        >>> str(Trial(size=8, fits=True, samples_per_second=1234.5, peak_bytes=2**30))
        'fits, 1,234 samples/s on each rank, 1.0 GiB at most'
        """
        if not self.fits:
            return "does not fit"
        text = f"fits, {self.samples_per_second:,.0f} samples/s on each rank"
        if self.peak_bytes is None:
            return text
        return f"{text}, {self.peak_bytes / 2**30:,.1f} GiB at most"


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
    """Try sizes until larger ones do not fit or are not faster.

    The search begins near `start` and halves the size until one fits. Then it doubles
    the size, and bisects between a size that fits and one that does not, as long as
    larger sizes are faster.

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
    not_faster = 0
    while low + 1 < high and not_faster < PATIENCE:
        best = max(trial.samples_per_second or 0 for trial in known)
        twice = max(_at_most(sizes, 2 * sizes[low]), low + 1)
        middle = (low + high) // 2 if high < len(sizes) else twice
        known.append(attempt(sizes[middle]))
        if not known[-1].fits:
            high = middle
            continue
        low = middle
        is_faster = (known[-1].samples_per_second or 0) > best * (1 + NOISE)
        not_faster = 0 if is_faster else not_faster + 1
    return sorted(known, key=lambda trial: trial.size)


def choose(trials: Sequence[Trial]) -> Trial:
    """The smallest size that is as fast as the fastest, apart from noise.

    >>> rates = {4: 50.0, 8: 98.0, 16: 100.0}
    >>> choose([Trial(size=n, fits=True, samples_per_second=r)
    ...         for n, r in rates.items()]).size
    8
    """
    fitting = [trial for trial in trials if trial.fits]
    best = max(trial.samples_per_second or 0 for trial in fitting)
    fast = [t for t in fitting if (t.samples_per_second or 0) * (1 + NOISE) >= best]
    return min(fast, key=lambda trial: trial.size)


def _at_most(sizes: Sequence[int], size: int) -> int:
    """The index of the largest size that is not above another."""
    return max((i for i, each in enumerate(sizes) if each <= size), default=0)
