"""What must be known to stop, read one window late and so without a price."""

from __future__ import annotations

import warnings
from collections import deque
from typing import Literal, get_args

from torch import Tensor

from trainkit.core.reading import LateReading
from trainkit.core.window import BAD_LOSS, BAD_WEIGHT, COUNT, LOST_MEAN, WEIGHT
from trainkit.errors import TrainkitError

Checks = Literal["late", "now"]
Nonfinite = Literal["raise", "allow", "skip"]


class Watch:
    """Looks at every window's flags, and stops the run when one must stop it.

    Args:
        checks: `"late"` reads a window's flags when a later one closes: the bad step
            has then been taken, and the error names it. `"now"` waits for them and
            refuses before the step.
        nonfinite: what a loss that is not finite and weighs something means: `"raise"`
            stops, `"allow"` leaves it to a gradient scaler, which skips such a step.
    """

    def __init__(self, checks: Checks, nonfinite: Nonfinite) -> None:
        for name, value, choices in (
            ("checks", checks, get_args(Checks)),
            ("nonfinite", nonfinite, get_args(Nonfinite)),
        ):
            if value not in choices:
                raise TrainkitError(
                    f"{name}: must be one of {list(choices)}, received {value!r}."
                )
        self.checks = checks
        self.nonfinite = nonfinite
        self._waiting: deque[tuple[int, LateReading]] = deque()
        self._lost_mean_at: int | None = None
        self._warned_weightless = False

    def submit(self, step: int, table: Tensor) -> None:
        """Take a closed window's table; complain of those that have arrived before."""
        if self.checks == "late":
            self.read_arrived()
        self._waiting.append((step, LateReading(table)))
        if self.checks == "now":
            self.read_all()

    def read_arrived(self) -> None:
        while self._waiting and self._waiting[0][1].arrived:
            self._read_next()

    def read_all(self) -> None:
        """Look at all windows so far; the host waits for the last."""
        while self._waiting:
            self._read_next()

    def forget(self) -> None:
        self._waiting.clear()

    def _read_next(self) -> None:
        step, reading = self._waiting.popleft()
        rows = reading.values()
        self._look(step, rows)

    def _look(self, step: int, rows: list[list[float]]) -> None:
        def ranks(column: int) -> str:
            return _names([i for i, row in enumerate(rows) if row[column]])

        where = f"optimizer step {step} (counted from 0)"
        if any(row[BAD_WEIGHT] for row in rows):
            raise TrainkitError(
                f"{where}, {ranks(BAD_WEIGHT)}: a micro-batch's weight must be finite "
                f"and not negative, and one was not. Look at the strategy's weight() "
                f"and at the mask or sample weights that it sums."
            )
        if any(row[LOST_MEAN] for row in rows) and self._lost_mean_at is None:
            self._lost_mean_at = step
        if any(row[BAD_LOSS] for row in rows) and self.nonfinite != "allow":
            raise TrainkitError(
                f"{where}, {ranks(BAD_LOSS)}: the loss must be finite where the "
                f"micro-batch weighs something, and one was NaN or infinite."
                f"{self._hint(step)}"
            )
        if sum(row[WEIGHT] for row in rows) == 0 and not self._warned_weightless:
            self._warned_weightless = True
            micro_batches = int(sum(row[COUNT] for row in rows))
            warnings.warn(
                f"{where}: none of the window's {micro_batches} micro-batches weighs "
                f"anything (all labels ignored?). Its gradient is zero and the step "
                f"was taken: momentum and weight decay still move the weights. Said "
                f"once.",
                stacklevel=2,
            )

    def _hint(self, step: int) -> str:
        if self._lost_mean_at is None:
            return (
                " The gradient of that step is lost; resume from a checkpoint before "
                "it, with checks='now' to stop before the step is taken."
            )
        return (
            f" At step {self._lost_mean_at} a micro-batch of weight 0 had a loss that "
            f"is not finite: if your loss divides by its own count, 0/0 made its "
            f"gradient NaN, which no weight can undo. Divide by count.clamp(min=1), "
            f"or return the sum and say loss_reduction='sum'."
        )


def _names(ranks: list[int]) -> str:
    listed = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"
