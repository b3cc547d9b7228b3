"""The callback that changes the size of windows during training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trainkit.core.checks import LateReading
from trainkit.core.ledger import Account
from trainkit.core.plan.stages import Stages, StageUnit, WindowSize
from trainkit.errors import TrainkitError
from trainkit.lit._compat import num_batches_seen
from trainkit.lit.batch_size.effective import num_replicas, steps_taken, train_loader
from trainkit.lit.callback.base import OrderedCallback, find_callback, has_callback
from trainkit.lit.callback.table import Row
from trainkit.lit.schedule import checks


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
            nothing waits for the device.
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
        self._tokens = TokenCount()
        self._was_asked = False

    def total_steps(
        self,
        trainer: Any = None,
        *,
        batches_per_epoch: int | None = None,
        epochs: int | None = None,
        max_steps: int | None = None,
        tokens_per_micro_batch: float | None = None,
    ) -> int:
        """How many optimizer steps the whole training takes.

        `trainer.estimated_stepping_batches` takes the first size for all. Give this to
        a scheduler instead, in `configure_optimizers`.

        >>> AccumulationSchedule({0: 4, 1: 2}).total_steps(
        ...     batches_per_epoch=10, epochs=2
        ... )
        8

        Args:
            trainer: says what is left out of the following.
            batches_per_epoch: micro-batches in an epoch, on one rank.
            epochs: how many.
            max_steps: where training stops anyway; -1 is nowhere.
            tokens_per_micro_batch: the mean over one rank's micro-batches, needed
                with `unit="tokens"`.
        """
        self._was_asked = True
        batches: Any = batches_per_epoch
        number: Any = epochs
        if trainer is not None:
            train_loader(trainer)
            batches = trainer.num_training_batches if batches is None else batches
            number = trainer.max_epochs if number is None else number
            max_steps = trainer.max_steps if max_steps is None else max_steps
            if tokens_per_micro_batch is not None:
                tokens_per_micro_batch *= num_replicas(trainer)
        limit: Any = math.inf if max_steps in (None, -1) else max_steps
        is_endless = batches == math.inf or number == -1
        if None in (batches, number) or (is_endless and limit == math.inf):
            raise TrainkitError(
                f"AccumulationSchedule.total_steps: it needs the length of training, "
                f"and has {batches} batches in an epoch and {number} epochs. Pass the "
                f"trainer, or batches_per_epoch= and epochs=; or set max_steps."
            )
        if is_endless:
            return limit
        return self.stages.num_steps(
            int(batches), number, max_steps=limit, tokens=tokens_per_micro_batch
        )

    # ---- before training -------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        self._forget()
        checks.refuse_other_sources(trainer, self)
        self.move_to_front(trainer)
        # Already right for what configure_optimizers asks of the Trainer.
        self._set(trainer, self.stages.at(0), first_batch=0)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        checks.refuse_other_hand(trainer, self._current)
        assert self._current is not None
        is_misled = self._current.was_divided_by and not self._was_asked
        windows = checks.require_windows(trainer)
        checks.refuse_unfit(trainer, windows, self.stages)
        saved, self._restored = self._restored, None
        before = None if saved is None else saved.get("tokens_before")
        self._tokens.resume(windows.ledger.of(), before)
        if saved is not None:
            self._set(trainer, saved["size"], first_batch=saved["first_batch"])
        else:  # perhaps resumed in mid-epoch, without a schedule's state
            self._open(trainer, first_batch=num_batches_seen(trainer))
        if is_misled:
            checks.announce_estimate(trainer, self.stages)
        self.show_table(trainer, pl_module)

    def table_rows(self, trainer: Any, pl_module: Any) -> list[Row]:
        pairs = [
            f"{size} from {self.stages.unit} {start:,} on"
            for start, size in zip(self.stages.starts, self.stages.sizes, strict=True)
        ]
        shown = [*pairs[:3], "...", pairs[-1]] if len(pairs) > 5 else pairs
        text = ", ".join(shown)
        is_finite = trainer.num_training_batches != math.inf
        if is_finite and trainer.max_epochs != -1 and self.stages.unit != "tokens":
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

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.stages.unit == "tokens":
            self._tokens.record(checks.require_windows(trainer).ledger.of())

    def _open(self, trainer: Any, *, first_batch: int) -> None:
        size = self.stages.at(self._position(trainer))
        self._set(trainer, size, first_batch=first_batch)

    def _set(self, trainer: Any, size: int, *, first_batch: int) -> None:
        self._current = WindowSize(size, first_batch)
        trainer.accumulate_grad_batches = self._current

    def _position(self, trainer: Any) -> float:
        if self.stages.unit == "epoch":
            return trainer.current_epoch
        if self.stages.unit == "tokens":
            return self._tokens.before_the_last
        return steps_taken(trainer)

    def _is_ours(self, trainer: Any) -> bool:
        if trainer.accumulate_grad_batches is self._current:
            return True
        # Its last epoch updates BatchNorm's statistics and is to take no step; it gives
        # the number back afterwards.
        if not has_callback(trainer.callbacks, "StochasticWeightAveraging"):
            checks.refuse_other_hand(trainer, self._current)
        return False

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
            "tokens_before": self._tokens.before_the_last,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict or None


class TokenCount:
    """All that has been weighed so far, read one window late."""

    def __init__(self) -> None:
        self._num_windows = 0
        self._waiting: list[LateReading] = []
        self._before: float = 0.0

    def __getstate__(self) -> dict[str, Any]:
        """The count as plain numbers."""
        counted = TokenCount()
        counted._before = self.before_the_last
        return vars(counted)

    @property
    def before_the_last(self) -> float:
        """The count up to the window before the one that closed last: it has long
        arrived, and all ranks have one value."""
        while len(self._waiting) > 1:
            self._before = self._waiting.pop(0).values()
        return self._before

    def record(self, account: Account | None) -> None:
        """Begin to read the count, if another window has closed."""
        if account is not None and account.num_windows != self._num_windows:
            self._num_windows = account.num_windows
            self._waiting.append(LateReading(account.weight))

    def resume(self, account: Account | None, before: float | None) -> None:
        """Continue from the account of the run that is resumed.

        Args:
            account: of the first optimizer.
            before: the count up to the window before its last one; default: its total.
        """
        self.record(account)
        if before is None and account is not None:
            before = account.weight.item()
        self._before = before or 0.0


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
