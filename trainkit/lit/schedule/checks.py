"""What an accumulation schedule cannot work with, refused by name."""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from torch.optim.lr_scheduler import ConstantLR, OneCycleLR, SequentialLR

from trainkit.core._compat import nested_schedulers, scheduler_milestones
from trainkit.core.ledger import Ledger
from trainkit.core.plan.rates import every_scheduler
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
    refusals.refuse_closures_that_repeat(trainer, stages.largest)
    refusals.refuse_unseen_batches(
        trainer.lightning_module, windows.strategy, stages.largest
    )
    # Its accumulators, which know the ranks too, are made after this.
    ranks = find_ranks(trainer.strategy, windows.aggregation)
    refuse_static_graph(ranks.ddp, stages.largest)
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


TOTALS = {"total_steps", "T_max", "total_iters"}
"""The names under which torch's schedulers keep their length."""


def look_for_wrong_totals(trainer: Any, schedule: Any) -> None:
    """Name schedulers that were made for `estimated_stepping_batches`."""
    num_batches, num_epochs = trainer.num_training_batches, trainer.max_epochs
    if num_batches == math.inf or num_epochs == -1:
        return
    estimated = math.ceil(num_batches / schedule.stages.at(0)) * num_epochs
    if trainer.max_steps != -1:
        estimated = min(estimated, trainer.max_steps)
    total = None  # by tokens, nobody knows it beforehand
    if schedule.stages.unit != "tokens":
        total = schedule.total_steps(trainer)
    if estimated == total:
        return
    for config in trainer.lr_scheduler_configs:
        if config.interval != "step":
            continue
        for scheduler in every_scheduler([config.scheduler]):
            named = [n for n, value in _totals(scheduler) if value == estimated]
            if named:
                _complain(scheduler, named[0], estimated, total)


def _complain(scheduler: Any, name: str, estimated: int, total: int | None) -> None:
    text = (
        f"{type(scheduler).__name__}: its {name} is {estimated}, which is what "
        f"trainer.estimated_stepping_batches says for windows of the first size"
    )
    if total is None:
        text += (
            ", and AccumulationSchedule changes that with the tokens it counts. In "
            "configure_optimizers, take schedule.total_steps(self.trainer, "
            "tokens_per_micro_batch=...), or set max_steps and take that."
        )
    else:
        text += (
            f"; with AccumulationSchedule training takes {total} optimizer steps. In "
            f"configure_optimizers, take schedule.total_steps(self.trainer)."
        )
    if isinstance(scheduler, OneCycleLR) and total is not None and total > estimated:
        raise TrainkitError(f"{text} It would raise at step {estimated + 1}.")
    warnings.warn(text, stacklevel=3)


def _totals(scheduler: Any) -> Iterator[tuple[str, float]]:
    """The lengths that a scheduler was made with, by name."""
    inside = nested_schedulers(scheduler)
    if isinstance(scheduler, SequentialLR):
        # The last one's own length is counted from its milestone on.
        start = scheduler_milestones(scheduler)[-1]
        yield from (
            (f"{type(inside[-1]).__name__}.{name} + {start}", start + value)
            for name, value in _totals(inside[-1])
        )
    is_known = type(scheduler).__module__.startswith("torch.")
    is_constant = isinstance(scheduler, ConstantLR)  # whose total_iters is a beginning
    for name, value in vars(scheduler).items():
        is_length = not name.startswith("_") and name != "last_epoch"
        if is_known:
            is_length = name in TOTALS and not is_constant
        if is_length and isinstance(value, int | float):
            yield name, value
    for function in getattr(scheduler, "lr_lambdas", ()):
        for name, value in _numbers_of(function).items():
            if isinstance(value, int | float):
                yield name, value


def _numbers_of(function: Any) -> Mapping[str, Any]:
    """The values that a user's function was made with, wherever it keeps them."""
    if isinstance(function, functools.partial):
        return function.keywords
    if inspect.ismethod(function):
        function = function.__self__
    if not inspect.isfunction(function):
        return getattr(function, "__dict__", {})
    defaults = inspect.signature(function).parameters.values()
    return {
        **inspect.getclosurevars(function).nonlocals,
        **{each.name: each.default for each in defaults},
    }
