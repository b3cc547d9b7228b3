"""Checks that may stop a run; they are read one window late, so that nothing waits."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from math import inf, isfinite
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from trainkit.core.plan.options import check_choice
from trainkit.core.strategies import AccumulationStrategy
from trainkit.core.window import BARE_LOSS, COUNT, LARGEST, LOSS, SMALLEST, WEIGHT
from trainkit.errors import TrainkitError

Checks = Literal["late", "now"]


class LateReading:
    """A device tensor on its way to the host, read when it has arrived.

    From a GPU the copy goes into pinned memory, after the work already queued, and
    `arrived` never waits. A CPU tensor has arrived at once.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._event: Any = None
        if tensor.is_cuda:
            self._host = torch.empty(
                tensor.shape, dtype=tensor.dtype, pin_memory=True
            ).copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))
        else:
            self._host = tensor

    @property
    def arrived(self) -> bool:
        return self._event is None or self._event.query()

    def values(self) -> Any:
        """The numbers, nested as in the tensor; waits if they have not arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()


class Watch:
    """Reads the flags of every window, and stops the run if it must stop.

    Args:
        checks: `"late"` reads a window's flags when a later one closes: a bad step has
            then been taken, and the error names it. `"now"` waits for them and refuses
            before the step.
        strategies: of the terms of a loss; windows are measured by the first.
        are_finite: returns whether all gradients and parameters are finite. It is
            called once, when a micro-batch of weight 0 had such a loss: its gradient is
            zero for most losses and NaN for some, and the loss does not show which.
        has_scaler: whether a gradient scaler skips steps that are not finite, so that
            such a loss does not stop the run.
    """

    def __init__(
        self,
        checks: Checks,
        strategies: Mapping[str, AccumulationStrategy],
        are_finite: Callable[[], bool],
        *,
        has_scaler: bool,
    ) -> None:
        check_choice("checks", checks, get_args(Checks))
        self.checks = checks
        self._has_scaler = has_scaler
        self._are_finite = are_finite
        term, strategy = next(iter(strategies.items()))
        self._term = term if len(strategies) > 1 else None
        # A sum that stays a sum has a gradient even if nothing weighs anything.
        self._divides = strategy.loss_reduction != "total"
        self._waiting: deque[tuple[int, LateReading, LateReading | None]] = deque()
        self._lost_mean_at: int | None = None
        self._warned_weightless = False

    def submit(
        self, step: int, table: Tensor, *, gradients: Iterable[Tensor] = ()
    ) -> None:
        """Add a closed window's table, and check earlier ones that have arrived.

        Args:
            step: the window's optimizer step.
            table: a row for each rank.
            gradients: the window's, not yet divided. Those in float16 are checked if
                there is no scaler: their sum overflows at 65,504, and no loss shows it.
        """
        if self.checks == "late":
            self.read_arrived()
        narrow = [g for g in gradients if g.dtype is torch.float16]
        late = None
        if narrow and not self._has_scaler:
            late = LateReading(torch.stack([g.isfinite().all() for g in narrow]).all())
        self._waiting.append((step, LateReading(table), late))
        if self.checks == "now":
            self.read_all()

    def read_arrived(self) -> None:
        while self._waiting and self._waiting[0][1].arrived:
            self._read_next()

    def read_all(self) -> None:
        """Check all windows so far; the host waits for the last."""
        while self._waiting:
            self._read_next()

    def forget(self) -> None:
        self._waiting.clear()

    def _read_next(self) -> None:
        step, reading, are_finite = self._waiting.popleft()
        rows = reading.values()
        if not _are_sound(rows):
            self._look(step, rows)
        if are_finite is not None and not are_finite.values():
            raise TrainkitError(
                f"optimizer step {step} (counted from 0): a gradient in float16 is "
                f"infinite or NaN, and the loss is finite: float16 ends at 65,504, and "
                f"there is no gradient scaler.{self._hint()} Use "
                f"precision='bf16-true', or '16-mixed', which has a scaler."
            )

    def _look(self, step: int, rows: list[list[float]]) -> None:
        where = f"optimizer step {step} (counted from 0)"
        micro_batches = int(sum(row[COUNT] for row in rows))
        if not micro_batches:
            raise TrainkitError(
                f"{where}: the window was empty on every rank, so it has no gradient. "
                f"Call backward() at least once before finish()."
            )
        if bad := _ranks(rows, lambda r: not (0 <= r[SMALLEST] <= r[LARGEST] < inf)):
            raise TrainkitError(
                f"{where}, {bad}: a micro-batch's weight must be finite and not "
                f"negative, and one was not. Check the strategy's weight(), or what "
                f"self.weigh() got, and the mask or sample weights that it sums."
            )
        lost = _ranks(rows, lambda r: isfinite(r[LOSS]) and not isfinite(r[BARE_LOSS]))
        if lost and self._lost_mean_at is None:
            self._lost_mean_at = step
            if not self._has_scaler and not self._are_finite():
                raise TrainkitError(f"{where}, {lost}:{self._hint()}")
        bad = _ranks(rows, lambda row: not isfinite(row[LOSS]))
        if bad and not self._has_scaler:
            raise TrainkitError(
                f"{where}, {bad}: the loss must be finite where the micro-batch "
                f"weighs something, and one was NaN or infinite.{self._hint()}"
            )
        is_weightless = self._divides and sum(row[WEIGHT] for row in rows) == 0
        if is_weightless and not self._warned_weightless:
            self._warned_weightless = True
            term = "" if self._term is None else f" in the term {self._term!r}"
            warnings.warn(
                f"{where}: none of the window's {micro_batches} micro-batches weighs "
                f"anything{term} (all labels ignored?). This gradient is zero and the "
                f"step was taken: momentum and weight decay still move the weights. "
                f"Said once.",
                stacklevel=2,
            )

    def _hint(self) -> str:
        if self._lost_mean_at is not None:
            return (
                f" at step {self._lost_mean_at} a micro-batch of weight 0 had a loss "
                f"that is not finite: if your loss divides by its own count, 0/0 made "
                f"its gradient NaN, which no weight can undo. Divide by "
                f"count.clamp(min=1), or return the sum and set loss_reduction='sum'."
            )
        if self.checks == "now":
            return " No step was taken with it. Check the batch and the loss."
        return (
            " The step was taken with it. Resume from an earlier checkpoint, with "
            "checks='now' to stop before the step."
        )


def _are_sound(rows: list[list[float]]) -> bool:
    """Whether all is finite, and something weighs something."""
    weighs = False
    for row in rows:
        if not (isfinite(row[BARE_LOSS]) and 0 <= row[SMALLEST] <= row[LARGEST] < inf):
            return False
        weighs = weighs or row[WEIGHT] > 0
    return weighs


def _ranks(rows: list[list[float]], wrong: Callable[[list[float]], bool]) -> str:
    """The ranks whose row is wrong, in words; empty if all are right."""
    found = [rank for rank, row in enumerate(rows) if wrong(row)]
    if not found:
        return ""
    listed = ", ".join(map(str, found[:8])) + (", ..." if len(found) > 8 else "")
    return f"rank{'s' if len(found) > 1 else ''} {listed}"
