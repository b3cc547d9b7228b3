"""The learning rates that a training will have, known before it begins."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from io import StringIO
from itertools import islice
from typing import Any

from lightning.pytorch.callbacks import LearningRateMonitor
from torch.optim.lr_scheduler import LRScheduler

from trainkit.core.plan.scaling import warmed_up
from trainkit.core.plan.stages import Stages
from trainkit.lit.callback.base import find_callback, has_callback
from trainkit.lit.rates.lr_scaling import LRScaling
from trainkit.lit.schedule.callback import AccumulationSchedule, total_steps

_KNOWN = ("torch.optim.", "trainkit.", "transformers.")
"""The packages whose schedulers compute rates and do nothing else."""
_MOST_STEPS = 300_000
"""Schedulers are run step by step, which takes about a second for this many."""
_MOST_POINTS = 2_000


@dataclass(frozen=True)
class RatePlan:
    """The rates that were planned when a training began.

    Attributes:
        steps: optimizer steps, counted from 0.
        rates: the rate at each of these steps, by the name under which it is logged.
        why_not: the reason, if there is no plan.
    """

    steps: list[float] = field(default_factory=list)
    rates: dict[str, list[float]] = field(default_factory=dict)
    why_not: str = ""


def plan_rates(trainer: Any, pl_module: Any) -> RatePlan:
    """Plan the rates by running copies of the schedulers, without effect on training.

    Args:
        trainer: in `on_train_start`, after `LRScaling` and `LearningRates`.
        pl_module: the module that it trains.

    Returns:
        The plan, or why there is none.
    """
    try:
        why_not = _why_unknown(trainer, pl_module)
        if why_not:
            return RatePlan(why_not=why_not)
        with redirect_stdout(StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no optimizer.step() goes before theirs
            plan = _run_ahead(trainer)
    except Exception as error:  # what a scheduler holds may not be copied
        why = f"{type(error).__name__}: {error}"
        return RatePlan(why_not=f"the scheduler cannot be run ahead ({why})")
    if not all(math.isfinite(rate) for rates in plan.rates.values() for rate in rates):
        return RatePlan(why_not="the scheduler gives rates that are not finite")
    return plan


def _why_unknown(trainer: Any, pl_module: Any) -> str:
    configs, scaling = trainer.lr_scheduler_configs, find_callback(trainer, LRScaling)
    held = [each for config in configs for each in _held(config.scheduler)]
    own = [each for each in held if not _is_known(each)]
    names = [getattr(each, "__name__", type(each).__name__) for each in own]
    groups = trainer.optimizers[0].param_groups
    by_tokens = _stages(trainer).unit == "tokens"
    others = has_callback(trainer.callbacks, "GradientAccumulationScheduler")
    holds = {
        "in manual optimization the module decides when a rate changes": (
            not pl_module.automatic_optimization
        ),
        "ReduceLROnPlateau goes by a metric": (
            any(config.reduce_on_plateau for config in configs)
        ),
        "the module has an lr_scheduler_step of its own": (
            not _is_known(type(pl_module).lr_scheduler_step)
        ),
        "the scheduler has a frequency other than 1": (
            any(config.frequency != 1 for config in configs)
        ),
        f"{', '.join(names)} may remember its calls, or read what only the training "
        f"has": bool(own),
        "LearningRates does not log each group of parameters once": (
            len(_rate_names(trainer)) != len(groups)
        ),
        "the rate is scaled by what the first windows are measured to hold": (
            scaling is not None and scaling.effective_batch is None
        ),
        "Lightning's GradientAccumulationScheduler changes the windows": others,
        "windows go by tokens, which are not known beforehand": by_tokens,
        "the training has no end that is known beforehand": (
            not (by_tokens or others) and total_steps(trainer) == math.inf
        ),
    }
    return next((why for why, is_so in holds.items() if is_so), "")


def _held(scheduler: Any) -> Iterator[Any]:
    """What computes a scheduler's rates: its class, and the functions that it holds."""
    yield type(scheduler)
    for value in vars(scheduler).values():
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, LRScheduler):  # of a SequentialLR, say
                yield from _held(each)
            elif callable(each):
                yield each.func if isinstance(each, partial) else each


def _is_known(function: Any) -> bool:
    """Whether a function or a class is not the user's."""
    home = getattr(function, "__module__", None) or type(function).__module__
    return home.startswith((*_KNOWN, "lightning.pytorch.", "pytorch_lightning."))


def _run_ahead(trainer: Any) -> RatePlan:
    optimizer, schedulers = _copies(trainer)
    factor = _factors(trainer)
    start = trainer.global_step
    end = min(int(total_steps(trainer)), start + _MOST_STEPS)
    every = math.ceil((end - start) / _MOST_POINTS) or 1
    steps: list[float] = []
    rates: list[list[float]] = [[] for _ in optimizer.param_groups]
    windows = enumerate(_stages(trainer).windows(trainer.num_training_batches))
    for step, (size, ends_epoch) in islice(windows, start, end):
        if (step - start) % every == 0 or step == end - 1:
            steps.append(step)
            for values, group in zip(rates, optimizer.param_groups, strict=True):
                values.append(float(group["lr"]) * factor(step, size))
        for interval, scheduler in schedulers:
            if interval == "step" or ends_epoch:
                scheduler.step()
    return RatePlan(steps, dict(zip(_rate_names(trainer), rates, strict=True)))


def _copies(trainer: Any) -> tuple[Any, list[tuple[str, Any]]]:
    """The first optimizer, without its weights and moments, and each scheduler."""
    optimizer = trainer.optimizers[0]
    shared = [p for group in optimizer.param_groups for p in group["params"]]
    memo: dict[int, Any] = {id(parameter): parameter for parameter in shared}
    memo[id(optimizer.state)] = {}
    configs = trainer.lr_scheduler_configs
    schedulers = [(each.interval, each.scheduler) for each in configs]
    return copy.deepcopy((optimizer, schedulers), memo)


def _factors(trainer: Any) -> Callable[[int, int], float]:
    """The ratio of `LRScaling`'s factor at a step, with its window, to the present."""
    scaling = find_callback(trainer, LRScaling)
    if scaling is None or scaling.effective_batch is None:
        return lambda step, size: 1.0
    batch, scaled = scaling.effective_batch, scaling.scaled[0]
    now = scaled.factor

    def factor(step: int, size: int) -> float:
        k = replace(batch, accumulate=size).over(scaling.reference_batch)
        return warmed_up(scaled.rule.lr(k), step, scaling.warmup_steps) / now

    return factor


def _stages(trainer: Any) -> Stages:
    schedule = find_callback(trainer, AccumulationSchedule)
    if schedule is not None:
        return schedule.stages
    return Stages((0,), (int(trainer.accumulate_grad_batches),), "step")


def _rate_names(trainer: Any) -> list[str]:
    """The names under which the rates of the groups are logged."""
    monitor = find_callback(trainer, LearningRateMonitor)
    return [] if monitor is None else list(monitor.lrs)
