"""Rows for the loggers, whose numbers are on their way from the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container
from typing import Any

import torch

from trainkit.core.checks import LateReading
from trainkit.lit._compat import add_callback_metrics
from trainkit.lit.logs.one_step import StepsDone, row_step

Numbers = Callable[[Any], dict[str, float]]
"""Makes the numbers of a row, by name, of what a reading holds. NaN is left out."""


class LateRows:
    """Rows that are logged when their numbers have arrived; nothing waits for them.

    Args:
        known: the last parts of names that callbacks see by another way.
    """

    def __init__(self, known: Container[str] = ()) -> None:
        self._known = known
        self._of_batch: list[tuple[int, int, LateReading, Numbers]] = []
        self._waiting: deque[tuple[int, LateReading, Numbers]] = deque()

    def add(
        self, trainer: Any, index: int, reading: LateReading, numbers: Numbers
    ) -> None:
        """Add the row of the step that an optimizer is about to make.

        Args:
            trainer: in `fit`.
            index: of the optimizer.
            reading: what is on its way.
            numbers: makes the row of it.
        """
        step = StepsDone(trainer.global_step + 1)
        self._of_batch.append((index, step, reading, numbers))

    def place(self, trainer: Any) -> None:
        """Let the windows that a batch has closed join the row of that batch.

        If an optimizer has made several steps, that is its last one.
        """
        now = row_step(trainer)
        last = {index: place for place, (index, *_) in enumerate(self._of_batch)}
        for place, (index, step, reading, numbers) in enumerate(self._of_batch):
            is_earlier = isinstance(now, StepsDone) and place != last[index]
            self._waiting.append((step if is_earlier else now, reading, numbers))
        self._of_batch.clear()

    def log_arrived(self, trainer: Any, *, wait: bool = False) -> None:
        """Log the rows that have arrived; `wait` waits for all."""
        while self._waiting and (wait or self._waiting[0][1].arrived):
            step, reading, numbers = self._waiting.popleft()
            row = numbers(reading.values())
            there = {name: value for name, value in row.items() if value == value}
            rest = {
                name: torch.tensor(value)
                for name, value in there.items()
                if name.rpartition("/")[2] not in self._known
            }
            add_callback_metrics(trainer, rest)
            for logger in trainer.loggers:
                logger.log_metrics(there, step=step)
