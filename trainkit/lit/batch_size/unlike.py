"""The differences between micro-batches that `Uniform()` counts alike."""

from __future__ import annotations

import math
from typing import Any

from trainkit.core.nested import tensors
from trainkit.core.strategies import Strategies, Uniform, num_samples
from trainkit.lit.callback.table import Row

LABEL = "Uniform"


def counts_alike(strategies: Strategies) -> bool:
    """Whether all micro-batches count alike, however much they hold."""
    return any(isinstance(each, Uniform) for each in strategies.values())


def row_before(batch_size: int | None, last: int | None) -> Row:
    """The row on `Uniform()` in the table before training.

    >>> row_before(8, 3)[1].partition(": ")[2]
    'micro-batches have 8 samples, the last of an epoch 3'

    Args:
        batch_size: the loader's batch size, if it has one.
        last: how many samples the last batch of an epoch has, if that is known.
    """
    known = "their size is not known yet"
    if batch_size is not None:
        known = f"micro-batches have {batch_size} samples"
        if last not in (None, batch_size):
            known += f", the last of an epoch {last}"
    return LABEL, (
        f"every micro-batch has weight 1, so the step is the big batch's only if all "
        f"have the same size: {known}"
    )


class Unlike:
    """A record of what the first micro-batches held, by the shapes of their tensors."""

    def __init__(self) -> None:
        self._samples: list[float] = []
        self._numbers: list[float] = []
        self.is_said = False

    def record(self, batch: Any) -> None:
        if self.is_said:
            return
        self._numbers.append(max((t.numel() for t in tensors(batch)), default=0))
        self._samples.append(num_samples(batch))

    def row(self) -> Row | None:
        """The row about the micro-batches, once; None if none was seen."""
        is_said, self.is_said = self.is_said, True
        if is_said or not self._numbers:
            return None
        held = _span(self._numbers, "numbers in the largest tensor")
        if not any(map(math.isnan, self._samples)):
            held = f"{_span(self._samples, 'samples')}, {held}"
        return LABEL, (
            f"the first {len(self._numbers)} micro-batches held {held}, and counted "
            f"alike"
        )


def _span(sizes: list[float], what: str) -> str:
    """
    >>> _span([3, 8], "samples"), _span([8, 8], "samples")
    ('3 to 8 samples', '8 samples each')
    """
    least, most = min(sizes), max(sizes)
    return f"{least} {what} each" if least == most else f"{least} to {most} {what}"
