"""The gradient noise scale of measured windows, and what a window of some size gains.

A model's estimate: McCandlish et al. 2018 (arXiv 1812.06162), appendix A, for
micro-batches of any weights. S is the sum of a window's contributions u_j = w_j g_j, G
the true gradient. Contributions of different micro-batches are independent, so

    E |S|^2 - E sum |u_j|^2  =  |G|^2 (W^2 - sum w_j^2)

whatever their noise is, and the noise of a sample is what is left of sum |u_j|^2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

COLUMNS = (
    "squared_sum",  # |S|^2
    "sum_of_squares",  # sum of |u_j|^2
    "squared_weight",  # W^2
    "squares_of_weights",  # sum of w_j^2
    "weight",  # W
    "samples",
    "windows",
)
"""What is added up over windows."""
BLOCKS, LEAST_BLOCKS = 20, 5
"""The most blocks of windows; from fewer than the least there is no interval, and so no
estimate."""

# Student's t at 95 %, by degrees of freedom.
_T = {4: 2.132, 5: 2.015, 6: 1.943, 7: 1.895, 8: 1.860, 9: 1.833, 10: 1.812, 11: 1.796}
_T |= {12: 1.782, 13: 1.771, 14: 1.761, 15: 1.753, 16: 1.746, 17: 1.740, 18: 1.734}
_T |= {19: 1.729}


@dataclass(frozen=True)
class NoiseEstimate:
    """The gradient noise scale: the window whose noise is as large as its gradient.

    Attributes:
        samples: the noise scale; infinite if no gradient is seen in the noise.
        low: the lower end of its 90 % interval.
        high: the upper end; infinite if it is only known to be at least `low`.
        window: how many samples the measured windows had, on average.
        weight: what a sample weighs on average, such as its number of tokens.
        num_windows: how many windows were measured.
    """

    samples: float
    low: float
    high: float
    window: float
    weight: float
    num_windows: int

    @classmethod
    def of(cls, windows: Sequence[Sequence[float]]) -> NoiseEstimate | None:
        """The estimate of measured windows, in their order.

        The averages come first and their ratio last: the ratio of one window is far off
        (its |G|^2 may be negative). Leaving out a block at a time shows how sure it is
        (the jackknife; Efron 1982). That is done for the share of noise in |S|^2, which
        is always between 0 and about 1, and the ends are then converted.

        Args:
            windows: `COLUMNS` of each; zeros for one of which some was not seen. One
                that weighs nothing is left out.

        Returns:
            None, if too few windows were measured, or each had one micro-batch alone.
        """
        known = [each for each in windows if each[2] > 0 and each[-1] > 0]
        filled = _in_blocks(_in_units(known))
        if len(filled) < LEAST_BLOCKS:
            return None
        total = [math.fsum(column) for column in zip(*filled, strict=True)]
        share = _share_of_noise(total)
        without = [
            _share_of_noise([a - b for a, b in zip(total, each, strict=True)])
            for each in filled
        ]
        if share is None or None in without:
            return None
        kept = [each for each in without if each is not None]
        squares = math.fsum((each - share) ** 2 for each in kept)
        # Without the jackknife's factor of (m - 1) / m, with which the interval of very
        # uneven windows covers the truth less often than it says.
        error = _T[min(len(kept) - 1, max(_T))] * math.sqrt(squares)
        weight, samples = total[4] / total[5], total[5]
        unit = total[2] / (weight**2 * samples)
        return cls(
            samples=_scale(unit, share),
            low=_scale(unit, share - error),
            high=_scale(unit, share + error),
            window=samples / total[6],
            weight=weight,
            num_windows=round(total[6]),
        )

    def facts(self) -> dict[str, float | None]:
        """The estimate for a JSON file, in which infinity is null."""
        return {k: v if v < math.inf else None for k, v in asdict(self).items()}

    @classmethod
    def of_facts(cls, facts: Mapping[str, float | None]) -> NoiseEstimate:
        """The estimate that `facts` has written.

        >>> one = NoiseEstimate(math.inf, 90.0, math.inf, 64.0, 1.0, 20)
        >>> NoiseEstimate.of_facts(one.facts()) == one
        True
        """
        known = {k: math.inf if v is None else v for k, v in facts.items()}
        return cls(**known)  # type: ignore[arg-type]

    @property
    def is_bounded(self) -> bool:
        """Whether the interval has an upper end."""
        return self.high < math.inf


def _in_units(windows: Sequence[Sequence[float]]) -> list[list[float]]:
    """Windows whose gradients are measured in units of those before them.

    Otherwise the long ones at the beginning of a training would outweigh all later
    ones. What came before does not depend on the window's own noise, so this adds no
    bias.
    """
    found, unit = [], 0.0  # |S|^2 / W^2 of the windows before
    for squared_sum, sum_of_squares, *rest in windows:
        own = squared_sum / rest[0]
        unit = unit if unit > 0 else own
        squares = (x / unit if x > 0 else 0.0 for x in (squared_sum, sum_of_squares))
        found.append([*squares, *rest])
        unit += (own - unit) / 4
    return found


def _in_blocks(windows: Sequence[Sequence[float]]) -> list[list[float]]:
    """The sums of windows that follow each other, in at most so many blocks.

    >>> _in_blocks([[1.0]] * 30)[:3]
    [[1.0], [2.0], [1.0]]
    """
    number = min(BLOCKS, len(windows))
    ends = [at * len(windows) // number for at in range(number + 1)] if windows else []
    return [
        [math.fsum(column) for column in zip(*windows[start:stop], strict=True)]
        for start, stop in pairwise(ends)
    ]


def _share_of_noise(sums: Sequence[float]) -> float | None:
    """The share of noise in |S|^2; None if nothing shows it."""
    squared_sum, sum_of_squares, squared_weight, squares_of_weights, *_ = sums
    pairs = squared_weight - squares_of_weights
    if pairs <= 1e-9 * squared_weight or squared_sum <= 0 or not sums[5] > 0:
        return None
    squared_gradient = (squared_sum - sum_of_squares) / pairs
    return 1 - squared_gradient * squared_weight / squared_sum


def _scale(unit: float, share: float) -> float:
    if share >= 1:
        return math.inf
    return unit * max(share, 0.0) / (1 - max(share, 0.0))


def per_sample(noise_scale: float, window: float) -> float:
    """The progress of a sample, as a share of what it does in a tiny window.

    >>> round(per_sample(210, 512), 2)
    0.29
    """
    return noise_scale / (window + noise_scale) if noise_scale < math.inf else 1.0
