"""The callback that changes the size of windows during training."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Mapping
from typing import Any

from trainkit.core.checks import LateReading
from trainkit.core.plan.stages import Stages, StageUnit, WindowSize
from trainkit.core.ranks import find_ranks
from trainkit.core.refusals import refuse_static_graph
from trainkit.core.strategies import PerSample, Uniform
from trainkit.errors import TrainkitError
from trainkit.lit._compat import num_batches_seen
from trainkit.lit.batch_size import (
    num_replicas,
    steps_taken,
    train_loader,
)
from trainkit.lit.callback.base import (
    OrderedCallback,
    find_callback,
    has_callback,
    windows_of,
)
from trainkit.lit.callback.table import Row


class AccumulationSchedule(OrderedCallback):
    """Changes the number of micro-batches in a window during training.

        AccumulationSchedule({0: 8, 10: 4, 20: 1})  # from epoch 10 on, 4
        AccumulationSchedule({0: 1, 500: 4}, unit="step")
        AccumulationSchedule.ramp(start=1, end=16, over=1000)

    A size changes at the edge of a window, in mid-epoch too, and an epoch begins with a
    whole window. The Trainer's own `accumulate_grad_batches` says the size of the
    window under way, to everybody; it is left out of the Trainer's arguments.

    Args:
        sizes: from each start on, how many micro-batches a window has; from 0 on, too.
        unit: what the starts count: epochs, optimizer steps, or tokens: all that the
            strategy has weighed, on all ranks. Tokens are read one window late, so that
            nothing waits for the device. They are counted from 0 if a checkpoint does
            not hold their number, as one of plain Lightning.
    """

    order = 0

    def __init__(self, sizes: Mapping[int, int], *, unit: StageUnit = "epoch") -> None:
        super().__init__()
        self.stages = Stages.make(sizes, unit)
        self._forget()

    @classmethod
    def ramp(
        cls, *, start: int, end: int, over: int, unit: StageUnit = "step"
    ) -> AccumulationSchedule:
        """Go from one size to another by ones, evenly.

        >>> AccumulationSchedule.ramp(start=1, end=3, over=1000).stages.starts
        (0, 500, 1000)

        Args:
            start: micro-batches of the first window.
            end: micro-batches of a window from `over` on.
            over: how many optimizer steps (epochs, tokens) it takes.
            unit: what `over` counts.
        """
        stages = Stages.ramp(start, end, over, unit)
        return cls(dict(zip(stages.starts, stages.sizes, strict=True)), unit=unit)

    def _forget(self) -> None:
        self._current: WindowSize | None = None
        self._restored: dict[str, Any] | None = None
        self._was_asked = False
        self._num_windows = 0
        # All that was weighed up to the window before the last, and up to the last.
        self._tokens: deque[LateReading | float] = deque([0.0, 0.0], maxlen=2)

    def total_steps(
        self, trainer: Any, *, tokens_per_micro_batch: float | None = None
    ) -> int:
        """How many optimizer steps the whole training takes.

        `trainer.estimated_stepping_batches` takes the first size for all. Give this to
        a scheduler instead, in `configure_optimizers`.

        Args:
            trainer: in `fit`.
            tokens_per_micro_batch: the mean over one rank's micro-batches, needed
                with `unit="tokens"`.
        """
        self._was_asked = True
        train_loader(trainer)
        batches, epochs = trainer.num_training_batches, trainer.max_epochs
        limit: Any = math.inf if trainer.max_steps == -1 else trainer.max_steps
        if batches == math.inf or epochs == -1:
            if limit == math.inf:
                raise TrainkitError(
                    f"AccumulationSchedule.total_steps: it needs the length of "
                    f"training, and has {batches} batches in an epoch and {epochs} "
                    f"epochs. Set max_steps."
                )
            return limit
        if tokens_per_micro_batch is not None:
            tokens_per_micro_batch *= num_replicas(trainer)
        return self.stages.num_steps(
            int(batches), epochs, max_steps=limit, tokens=tokens_per_micro_batch
        )

    # ---- before training -------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        self._forget()
        self._refuse_other_sources(trainer)
        self.move_to_front(trainer)
        # Already right for what configure_optimizers asks of the Trainer.
        self._set(trainer, self.stages.at(0), first_batch=0)

    def _refuse_other_sources(self, trainer: Any) -> None:
        names = "GradientAccumulationScheduler", "AccumulationSchedule"
        others = [
            type(each).__name__
            for each in trainer.callbacks
            if each is not self and has_callback([each], *names)
        ]
        asked = trainer.accumulate_grad_batches
        if asked != 1:
            others.append(f"Trainer(accumulate_grad_batches={asked})")
        if others:
            raise TrainkitError(
                f"AccumulationSchedule: it says the size of every window, and "
                f"{', '.join(others)} says one too. Keep one of them: {{0: 3}} begins "
                f"with windows of 3."
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._refuse_other_hand(trainer)
        windows: Any = windows_of(trainer)
        if windows is None:  # plain Lightning divides by the size now in force
            raise TrainkitError(
                "AccumulationSchedule: it needs the callback that weighs and divides "
                "the windows it makes, and found none. Add "
                "AccumulationCallback(PerSample()), say, to the Trainer's callbacks, "
                "or let the module inherit AccumulationMixin."
            )
        # What the largest window would be refused for is refused before the first.
        largest, aggregation = max(self.stages.sizes), windows.aggregation
        refuse_static_graph(find_ranks(trainer.strategy, aggregation).ddp, largest)
        counts_others = isinstance(windows.strategy, PerSample | Uniform)
        if self.stages.unit == "tokens" and counts_others:
            raise TrainkitError(
                f"AccumulationSchedule(unit='tokens'): the weights of windows must be "
                f"tokens, and {type(windows.strategy).__name__} does not weigh tokens. "
                f"Use PerToken(), or write the stages by step or epoch."
            )
        self._announce_estimate(trainer)
        saved, self._restored = self._restored or {}, None
        account, before = windows.ledger.of(), saved.get("tokens_before")
        if account is not None:  # resumed, perhaps with another plan
            self._tokens.append(account.weight.item() if before is None else before)
            self._count_tokens(account)
        if saved:
            self._set(trainer, saved["size"], first_batch=saved["first_batch"])
        else:  # perhaps resumed in mid-epoch, without a schedule's state
            self._open(trainer, first_batch=num_batches_seen(trainer))
        self.show_table(trainer, pl_module)

    def _refuse_other_hand(self, trainer: Any) -> None:
        if trainer.accumulate_grad_batches is not self._current:
            raise TrainkitError(
                f"trainer.accumulate_grad_batches: AccumulationSchedule sets it, and "
                f"somebody else has set it to {trainer.accumulate_grad_batches}. Leave "
                f"it alone, and write the change into the schedule."
            )

    def _announce_estimate(self, trainer: Any) -> None:
        """Warn that a scheduler may be made for another number of steps."""
        assert self._current is not None
        is_misled = self._current.was_divided_by and not self._was_asked
        by_step = any(c.interval == "step" for c in trainer.lr_scheduler_configs)
        changes = len(set(self.stages.sizes)) > 1
        if is_misled and by_step and changes and _is_finite(trainer):
            is_tokens = self.stages.unit == "tokens"
            more = ", tokens_per_micro_batch=..." if is_tokens else ""
            warnings.warn(
                f"trainer.estimated_stepping_batches: it was read before training, and "
                f"takes windows of the first size, {self.stages.sizes[0]}, for all. In "
                f"configure_optimizers, take "
                f"schedule.total_steps(self.trainer{more}).",
                stacklevel=3,
            )

    def table_rows(self, trainer: Any, pl_module: Any) -> list[Row]:
        pairs = [
            f"{size} from {self.stages.unit} {start:,} on"
            for start, size in zip(self.stages.starts, self.stages.sizes, strict=True)
        ]
        shown = [*pairs[:3], "...", pairs[-1]] if len(pairs) > 5 else pairs
        text = ", ".join(shown)
        if _is_finite(trainer) and self.stages.unit != "tokens":
            text += f": {self.total_steps(trainer):,} steps in all"
        return [("accumulation", text)]

    # ---- at the edge of a window -----------------------------------------------------

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if self._is_ours(trainer):
            self._open(trainer, first_batch=0)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._is_ours(trainer):
            return
        # At 0 again: a run that is resumed from the last batch of an epoch, in its
        # on_train_batch_end, begins the next one without on_train_epoch_start.
        if batch_idx == 0 or batch_idx % trainer.accumulate_grad_batches == 0:
            self._open(trainer, first_batch=batch_idx)

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        windows = windows_of(trainer)
        if self.stages.unit == "tokens" and windows is not None:
            self._count_tokens(windows.ledger.of())

    def _open(self, trainer: Any, *, first_batch: int) -> None:
        position = steps_taken(trainer)
        if self.stages.unit == "epoch":
            position = trainer.current_epoch
        elif self.stages.unit == "tokens":
            position = self._tokens_before
        self._set(trainer, self.stages.at(position), first_batch=first_batch)

    def _set(self, trainer: Any, size: int, *, first_batch: int) -> None:
        self._current = WindowSize(size, first_batch)
        trainer.accumulate_grad_batches = self._current

    def _is_ours(self, trainer: Any) -> bool:
        if trainer.accumulate_grad_batches is self._current:
            return True
        # Its last epoch updates BatchNorm's statistics and is to take no step; it gives
        # the number back afterwards.
        if not has_callback(trainer.callbacks, "StochasticWeightAveraging"):
            self._refuse_other_hand(trainer)
        return False

    # ---- tokens ----------------------------------------------------------------------

    @property
    def _tokens_before(self) -> float:
        """All that was weighed up to the window before the one that closed last: it
        has long arrived, and all ranks have one value."""
        before = self._tokens[0]
        return before.values() if isinstance(before, LateReading) else before

    def _count_tokens(self, account: Any) -> None:
        """Begin to read the count, if another window has closed."""
        if account is not None and account.num_windows != self._num_windows:
            self._num_windows = account.num_windows
            self._tokens.append(LateReading(account.weight))

    # ---- afterwards ------------------------------------------------------------------

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if trainer.accumulate_grad_batches is self._current:
            trainer.accumulate_grad_batches = 1

    def on_exception(
        self, trainer: Any, pl_module: Any, exception: BaseException
    ) -> None:
        self.teardown(trainer, pl_module, "fit")

    def state_dict(self) -> dict[str, Any]:
        if self._restored is not None:
            return self._restored  # lr_find saves and loads before training begins
        if self._current is None:
            return {}
        return {
            "size": int(self._current),
            "first_batch": self._current.first_batch,
            "tokens_before": self._tokens_before,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict or None


def _is_finite(trainer: Any) -> bool:
    """Whether the number of batches of the whole training is known."""
    return trainer.num_training_batches != math.inf and trainer.max_epochs != -1


def total_steps(trainer: Any) -> float:
    """All optimizer steps of a `fit`, or infinity.

    Args:
        trainer: in `fit`; in `configure_optimizers` already.

    Raises:
        TrainkitError: a schedule in tokens cannot tell before tokens are known.
    """
    schedule = find_callback(trainer, AccumulationSchedule)
    if schedule is not None:
        return schedule.total_steps(trainer)
    return trainer.estimated_stepping_batches
