"""What an accumulation schedule cannot work with, refused by name."""

from __future__ import annotations

import warnings
from typing import Any

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
    asked = trainer.accumulate_grad_batches
    if asked != 1:
        others.append(f"Trainer(accumulate_grad_batches={asked})")
    if others:
        raise TrainkitError(
            f"AccumulationSchedule: it says the size of every window, and "
            f"{', '.join(others)} says one too. Keep one of them: {{0: 3}} begins with "
            f"windows of 3."
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
        if trainer.global_step and windows.ledger.of() is None:
            warnings.warn(
                f"AccumulationSchedule(unit='tokens'): training resumes at step "
                f"{trainer.global_step} from a checkpoint that holds no count of "
                f"tokens, so they are counted from 0. Write the stages for the tokens "
                f"that are to come.",
                stacklevel=2,
            )


def announce_estimate(trainer: Any, stages: Stages) -> None:
    """Warn that a scheduler may be made for another number of steps."""
    by_step = [c for c in trainer.lr_scheduler_configs if c.interval == "step"]
    is_finite = (
        trainer.num_training_batches != float("inf") and trainer.max_epochs != -1
    )
    if by_step and is_finite and len(set(stages.sizes)) > 1:
        more = ", tokens_per_micro_batch=..." if stages.unit == "tokens" else ""
        warnings.warn(
            f"trainer.estimated_stepping_batches: it was read before training, and "
            f"takes windows of the first size, {stages.sizes[0]}, for all. In "
            f"configure_optimizers, take schedule.total_steps(self.trainer{more}).",
            stacklevel=3,
        )
