"""The effective batch: how many samples or tokens one optimizer step sees."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Literal, get_args

from trainkit.core.whole_number import check_whole_number
from trainkit.errors import TrainkitError

Unit = Literal["samples", "tokens"]


@dataclass(frozen=True, kw_only=True)
class EffectiveBatch:
    """Micro-batch x accumulation x data-parallel replicas.

    >>> batch = EffectiveBatch(micro_batch=8, accumulate=4, replicas=2)
    >>> batch.size
    64
    >>> print(batch)
    per-device batch 8 x accumulation 4 x ranks 2 = 64 samples a step
    >>> batch.over(32)
    2.0

    Attributes:
        micro_batch: samples or tokens that one replica's forward pass sees; a mean if
            it was measured.
        accumulate: how many micro-batches a replica accumulates.
        replicas: how many ranks have data of their own. Ranks that share one replica
            (tensor parallelism) count once.
        unit: what is counted.
        windows_measured: the number of windows over which `micro_batch` was measured;
            0 if it is known.

    Raises:
        TrainkitError: a number is not positive, or not whole where it must be.
    """

    micro_batch: float
    accumulate: int = 1
    replicas: int = 1
    unit: Unit = "samples"
    windows_measured: int = 0

    def __post_init__(self) -> None:
        check_unit("EffectiveBatch", self.unit)
        check_size("EffectiveBatch micro_batch", self.micro_batch)
        for name in ("accumulate", "replicas"):
            check_whole_number(f"EffectiveBatch {name}", getattr(self, name))

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


def check_unit(name: str, unit: str) -> None:
    if unit not in get_args(Unit):
        raise TrainkitError(
            f"{name} unit: must be one of {list(get_args(Unit))}, received {unit!r}."
        )


def check_size(name: str, size: object) -> None:
    is_number = isinstance(size, Real) and not isinstance(size, bool)
    if not is_number or not (0 < size < math.inf):  # type: ignore[operator]
        raise TrainkitError(
            f"{name}: must be a positive number, received {size!r}. It is the number "
            f"of samples (or tokens) that one optimizer step sees."
        )


def brief(number: float) -> str:
    """A number as a person writes it.

    >>> brief(64.0), brief(0.2), brief(0.1 * 3), brief(12345.678), brief(64)
    ('64', '0.2', '0.3', '12,346', '64')
    """
    if abs(number) < 1e15 and number == int(number):
        return f"{int(number):,}"
    return f"{number:,.0f}" if abs(number) >= 9999.5 else f"{number:.4g}"
