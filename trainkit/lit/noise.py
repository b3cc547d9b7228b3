"""The callback that measures the noise scale while a training runs."""

from __future__ import annotations

import math
from random import Random
from typing import Any, Literal

import torch

from trainkit.core.checks import LateReading
from trainkit.core.noise.advice import NOT_MEASURED, advice
from trainkit.core.noise.estimate import (
    COLUMNS,
    LEAST_BLOCKS,
    NoiseEstimate,
    per_sample,
)
from trainkit.core.noise.moments import NoiseMoments
from trainkit.core.plan.options import check_choice, check_whole_number
from trainkit.core.strategies import PerToken
from trainkit.errors import TrainkitError
from trainkit.lit._compat import is_scaled, scaler_of, unwrapped
from trainkit.lit.batch_size import may_be_several
from trainkit.lit.callback.base import (
    OrderedCallback,
    WindowOwner,
    windows_of,
)
from trainkit.lit.callback.table import Row, say, show
from trainkit.lit.logs.rows import LateNumbers

KEY = "trainkit_noise_scale"
TOO_FEW = (
    f"it takes {LEAST_BLOCKS} measured windows of several micro-batches each, whose "
    f"parameters get their gradients whole (checkpoint with use_reentrant=False)"
)


class NoiseScale(OrderedCallback):
    """Measures the gradient noise scale: how large a window is worth its samples.

    A window far below it makes as much progress per sample as a tiny one; a window far
    above it hardly more per step than a smaller one. The micro-batches of a window, on
    all ranks, show it: the more their gradients agree, the smaller it is. One window of
    every n is measured, and logged with it are, over the last 160 measured ones:

    - `window/noise_scale`: the estimate, in samples;
    - `window/noise_scale_low`, `window/noise_scale_high`: its 90 % interval. Without an
      upper end the scale is only known to be at least the lower one;
    - `window/efficiency`: the window's progress per sample, as a share of a tiny one's.

    It is good to about a factor of 2 (McCandlish et al. 2018, arXiv 1812.06162; Merrill
    et al. 2025, arXiv 2505.23971). Rows that are sorted by length before they are cut
    raise it by 5 to 10 %. With the inner cut nothing can be measured.

    A training with it is the same to the bit, and a resumed run continues the estimate;
    the window in which it was saved is left out.

    Args:
        every_n_steps: one window of so many is measured, which costs one norm of each
            gradient.
        if_impossible: `"raise"` an error where nothing can be measured (a window is one
            micro-batch of one rank, or cut inside; parameters are sharded; there are
            several optimizers, or terms of the loss), or `"say"` so in the table and
            train.
        advise: whether to print after training what the estimate means.

    Attributes:
        why_not: why nothing is measured; None if it is.
    """

    order = 4

    def __init__(
        self,
        every_n_steps: int = 10,
        *,
        if_impossible: Literal["raise", "say"] = "raise",
        advise: bool = True,
    ) -> None:
        super().__init__()
        check_whole_number("NoiseScale every_n_steps", every_n_steps)
        check_choice("NoiseScale if_impossible", if_impossible, ["raise", "say"])
        self.every_n_steps = every_n_steps
        self.if_impossible = if_impossible
        self.advise = advise
        self.why_not: str | None = None
        self._found: NoiseEstimate | None = None
        self._restored: Any = None
        self._forget()

    def _forget(self) -> None:
        self._moments: NoiseMoments | None = None
        self._windows: WindowOwner | None = None
        self._rows = LateNumbers()

    @property
    def estimate(self) -> NoiseEstimate | None:
        """The estimate so far; None if there is none. Waits for the device."""
        return self._found if self._moments is None else self._moments.estimate()

    # ---- before training -------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if sum(isinstance(c, NoiseScale) for c in trainer.callbacks) > 1:
            raise TrainkitError("NoiseScale: there are two of them. Keep one.")
        if stage == "fit":
            self._forget()
            self._found = None
            self.move_to_front(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        restored, self._restored = self._restored, None
        windows = self._windows = windows_of(trainer)
        self.why_not = _why_not(trainer, pl_module, windows)
        if windows is not None and self.why_not is None:
            optimizer = unwrapped(trainer.optimizers[0])
            try:
                self._moments = NoiseMoments(windows.accumulators[0], optimizer)
            except TrainkitError as error:
                self.why_not = str(error).removeprefix("noise scale: ")
            windows.counts_samples = True
        if self.why_not is not None and self.if_impossible == "raise":
            raise TrainkitError(f"NoiseScale: {self.why_not}")
        if self._moments is not None and restored is not None:
            self._moments.load_state_dict(restored)
        self.show_table(trainer, pl_module)

    def table_rows(self, trainer: Any, pl_module: Any) -> list[Row]:
        if self.why_not is not None:
            return [("noise scale", f"{NOT_MEASURED}{self.why_not}")]
        every = self.every_n_steps
        which = "every window" if every == 1 else f"one of {every} windows"
        return [("noise scale", f"measured in {which}")]

    # ---- a window --------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        moments, windows = self._moments, self._windows
        if moments is not None and windows is not None and not moments.is_watching:
            accumulator = windows.accumulators[0]
            is_due = is_measured(accumulator.num_windows, self.every_n_steps)
            if is_due and not accumulator.is_open:
                moments.watch()

    def on_before_optimizer_step(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self.on_window_finished(trainer, 0)

    def on_window_finished(self, trainer: Any, index: int) -> None:
        """Add the window that has just been divided, before anybody clips it."""
        moments, windows = self._moments, self._windows
        if moments is None or windows is None or not moments.is_finished:
            return
        stats = windows.windows[0]
        scaler, scale = scaler_of(trainer), 1.0
        if scaler is not None and is_scaled(scaler, trainer.optimizers[0]):
            scale = scaler.scale(torch.ones_like(stats.weight))
        moments.add(stats, scale=scale)
        this = torch.zeros_like(moments.table[:1])
        this[0, COLUMNS.index("samples")] = stats.samples
        reading = LateReading(torch.cat([moments.table, this]))
        self._rows.add_row(trainer, reading, _numbers)

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self._rows.serve()

    # ---- afterwards ------------------------------------------------------------------

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._rows.serve(wait=True)
        moments, windows = self._moments, self._windows
        self._end()
        if moments is None or not (self.advise and trainer.is_global_zero):
            return
        if self._found is None:
            say(trainer, ("noise scale", f"{NOT_MEASURED}{TOO_FEW}"))
        else:
            is_tokens = windows is not None and isinstance(windows.strategy, PerToken)
            show(advice(self._found, "tokens" if is_tokens else "samples"))

    def on_exception(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self._end()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._end()

    def _end(self) -> None:
        """Take the hooks away; only the estimate stays."""
        if self._moments is not None:
            self._moments.stop()
            self._found = self._moments.estimate()
        self._moments = self._windows = None

    def on_save_checkpoint(
        self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        self._rows.serve(wait=True)  # a resumed run has none of these
        if self._moments is not None:
            checkpoint[KEY] = self._moments.state_dict()

    def on_load_checkpoint(
        self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn == "fit":
            self._restored = checkpoint.get(KEY)


def is_measured(number: int, every: int) -> bool:
    """Whether a window is measured: one at random of each `every`, by their number.

    Each nth would often be the short last one where an epoch has few windows. Which it
    is depends on the number alone, so a resumed run measures what it would have.

    >>> [number for number in range(50) if is_measured(number, 10)]
    [6, 12, 20, 33, 43]
    """
    group, place = divmod(number, every)
    return place == Random(group).randrange(every)


def _why_not(trainer: Any, pl_module: Any, windows: WindowOwner | None) -> str | None:
    """Why nothing can be measured; None if nothing speaks against it."""
    if windows is None:
        return (
            "it measures the windows of AccumulationCallback or AccumulationMixin, and "
            "neither is there. Add AccumulationCallback(PerToken()), say, to the "
            "Trainer's callbacks."
        )
    if windows.inside is not None:
        return (
            "MicroBatching(inside=...) runs a loader batch in one backward pass, and "
            "chunks of rows have no gradients of their own. Measure with "
            "MicroBatching(size=...) or trainer.accumulate_grad_batches."
        )
    if windows.shares_statistics:
        return (
            "BatchNormGuard('exact') lets micro-batches share statistics, so none has "
            "a gradient of its own to compare. Use another policy to measure."
        )
    if len(trainer.optimizers) != 1:
        return (
            f"it measures the gradients of one optimizer, and there are "
            f"{len(trainer.optimizers)}."
        )
    has_ranks = windows.accumulators[0].ranks.size > 1
    if not has_ranks and not may_be_several(trainer, pl_module, windows):
        return (
            "each window is one micro-batch of one rank, and it compares several. "
            "Raise trainer.accumulate_grad_batches, or cut the batch with "
            "MicroBatching(size=...)."
        )
    return None


def _numbers(table: list[list[float]]) -> dict[str, float]:
    """The row of a measured window, which stands last in the table."""
    *windows, this = table
    found = NoiseEstimate.of(windows)
    if found is None:
        return {}
    samples = this[-2]
    row = {
        "window/noise_scale": found.samples,
        "window/noise_scale_low": found.low,
        "window/noise_scale_high": found.high,
        "window/efficiency": per_sample(found.samples, samples),
    }
    return {name: value for name, value in row.items() if value < math.inf}
