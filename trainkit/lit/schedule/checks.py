"""What an accumulation schedule cannot work with, refused by name."""

from __future__ import annotations

import math
import warnings
from typing import Any

from trainkit.core.ledger import Ledger
from trainkit.core.plan.stages import Stages
from trainkit.core.ranks import find_ranks
from trainkit.core.refusals import refuse_static_graph
from trainkit.errors import TrainkitError
from trainkit.lit.batch_size.effective import check_measurable
from trainkit.lit.callback.base import has_callback, windows_of
from trainkit.lit.windows import refusals


def refuse_other_sources(trainer: Any, schedule: Any) -> None:
    """One source says the size of a window."""
    others = [
        type(c).__name__
        for c in trainer.callbacks
        if c is not schedule
        and has_callback([c], "GradientAccumulationScheduler", "AccumulationSchedule")
    ]
    if others:
        raise TrainkitError(
            f"AccumulationSchedule: one callback must say the size of a window, and "
            f"{', '.join(others)} is there too. Keep one of them."
        )
    asked = trainer.accumulate_grad_batches
    if asked != 1:
        raise TrainkitError(
            f"AccumulationSchedule: it says the size of every window, and "
            f"Trainer(accumulate_grad_batches={asked}) says one too. Leave that out; "
            f"write {{0: {asked}, ...}} to begin with it."
        )


def refuse_other_hand(trainer: Any, current: Any) -> None:
    if trainer.accumulate_grad_batches is not current:
        raise TrainkitError(
            f"trainer.accumulate_grad_batches: AccumulationSchedule sets it, and "
            f"somebody else has set it to {trainer.accumulate_grad_batches}. Leave it "
            f"alone, and write the change into the schedule."
        )


def require_windows(trainer: Any) -> Any:
    """The callback that divides: plain Lightning divides by the size now in force."""
    windows = windows_of(trainer)
    if windows is None:
        raise TrainkitError(
            "AccumulationSchedule: it needs the callback that weighs and divides the "
            "windows it makes, and found none. Add AccumulationCallback(PerSample()), "
            "say, to the Trainer's callbacks, or let the module inherit "
            "AccumulationMixin."
        )
    return windows


def refuse_unfit(trainer: Any, windows: Any, stages: Stages) -> None:
    """What the largest window would be refused for is refused before the first."""
    largest = max(stages.sizes)
    refusals.refuse_unseen_batches(trainer.lightning_module, windows.strategy, largest)
    # Its accumulators, which know the ranks too, are made after this.
    ranks = find_ranks(trainer.strategy, windows.aggregation)
    refuse_static_graph(ranks.ddp, largest)
    if stages.unit == "tokens":
        check_measurable(trainer, "tokens")


def announce_uncounted_tokens(trainer: Any, ledger: Ledger) -> None:
    """Name a checkpoint that was written without trainkit's count of tokens."""
    if trainer.global_step and ledger.of() is None:
        warnings.warn(
            f"AccumulationSchedule(unit='tokens'): training resumes at step "
            f"{trainer.global_step} from a checkpoint that holds no count of tokens, "
            f"so they are counted from 0. Write the stages for the tokens that are to "
            f"come.",
            stacklevel=2,
        )


def refuse_endless(num_batches: Any, num_epochs: Any, max_steps: float) -> None:
    if num_batches is None or num_epochs is None:
        raise TrainkitError(
            "AccumulationSchedule.total_steps: it needs the length of training. Pass "
            "the trainer, or batches_per_epoch= and epochs=."
        )
    is_endless = num_batches == math.inf or num_epochs == -1
    if is_endless and not math.isfinite(max_steps):
        raise TrainkitError(
            f"AccumulationSchedule.total_steps: training has no end that is known, "
            f"with {num_batches} batches in an epoch and max_epochs={num_epochs}. Set "
            f"max_steps."
        )


def announce_estimate(trainer: Any, schedule: Any) -> None:
    """Warn that schedulers may be made for `trainer.estimated_stepping_batches`, which
    was read before training, while `schedule.total_steps` was not asked."""
    num_batches, num_epochs = trainer.num_training_batches, trainer.max_epochs
    by_step = [c for c in trainer.lr_scheduler_configs if c.interval == "step"]
    if num_batches == math.inf or num_epochs == -1 or not by_step:
        return
    estimated = math.ceil(num_batches / schedule.stages.at(0)) * num_epochs
    if trainer.max_steps != -1:
        estimated = min(estimated, trainer.max_steps)
    text = (
        f"trainer.estimated_stepping_batches: it was read before training, and says "
        f"{estimated} optimizer steps, for windows of the first size"
    )
    if schedule.stages.unit == "tokens":
        text += (
            ", and AccumulationSchedule changes that with the tokens it counts. In "
            "configure_optimizers, take schedule.total_steps(self.trainer, "
            "tokens_per_micro_batch=...), or set max_steps and take that."
        )
    else:
        total = schedule.total_steps(trainer)
        if total == estimated:
            return
        text += (
            f"; with AccumulationSchedule training takes {total}. In "
            f"configure_optimizers, take schedule.total_steps(self.trainer)."
        )
    warnings.warn(text, stacklevel=3)
