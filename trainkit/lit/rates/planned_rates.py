"""The learning rates that a training will have, known before it begins."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from itertools import islice
from typing import Any

from lightning.pytorch.callbacks import LearningRateMonitor

from trainkit.core.generators import read_states, same_states, write_states
from trainkit.core.plan.rate_plan import RatePlan
from trainkit.core.plan.scaling import warmed_up
from trainkit.core.plan.stages import Stages
from trainkit.errors import TrainkitError
from trainkit.lit.callback.base import find_callback, has_callback
from trainkit.lit.rates.lr_scaling import LRScaling
from trainkit.lit.rates.scheduler_copies import copy_schedulers
from trainkit.lit.schedule.callback import AccumulationSchedule, total_steps

_MOST_STEPS = 300_000
"""Schedulers are run step by step, which takes about a second for this many."""
_MOST_SECONDS = 3.0
"""When this time is over, the plan ends with the steps that are known by then."""
_MOST_POINTS = 2_000


def plan_rates(trainer: Any, pl_module: Any) -> RatePlan:
    """Plan the rates by running copies of the schedulers, without effect on training.

    Args:
        trainer: in `on_train_start`, after `LRScaling` and `LearningRates`.
        pl_module: the module that it trains.

    Returns:
        The plan, or why there is none.
    """
    why_not = _why_unknown(trainer, pl_module)
    if why_not:
        return RatePlan(why_not=why_not)
    before = read_states(pl_module.device)
    try:
        with redirect_stdout(StringIO()):  # schedulers may print
            plan = _run_ahead(trainer)
    except Exception as error:  # a user's scheduler may raise anything
        is_own = isinstance(error, TrainkitError)
        why = str(error) if is_own else f"{type(error).__name__}: {error}"
        return RatePlan(why_not=f"the scheduler cannot be run ahead ({why})")
    finally:
        after = read_states(pl_module.device)
        write_states(before, pl_module.device)
    if not same_states(before, after):
        return RatePlan(why_not="the scheduler draws random numbers")
    return plan


def _why_unknown(trainer: Any, pl_module: Any) -> str:
    configs = trainer.lr_scheduler_configs
    if not pl_module.automatic_optimization:
        return "in manual optimization the module decides when a rate changes"
    if any(config.reduce_on_plateau for config in configs):
        return "ReduceLROnPlateau goes by a metric"
    if _overrides_scheduler_step(pl_module):
        return "the module has an lr_scheduler_step of its own"
    if any(config.frequency != 1 for config in configs):
        return "the scheduler has a frequency other than 1"
    if len(_rate_names(trainer)) != len(trainer.optimizers[0].param_groups):
        return "LearningRates does not log each group of parameters once"
    try:
        if total_steps(trainer) == math.inf:
            return "the training has no end that is known beforehand"
    except TrainkitError:
        return "windows go by tokens, which are not known beforehand"
    return _why_windows_unknown(trainer)


def _overrides_scheduler_step(pl_module: Any) -> bool:
    not_the_users = ("lightning.pytorch.", "pytorch_lightning.", "trainkit.lit.")
    return not type(pl_module).lr_scheduler_step.__module__.startswith(not_the_users)


def _why_windows_unknown(trainer: Any) -> str:
    """Why the sizes of windows are unknown, if the rates depend on them.

    They do if rates are scaled with the window, or if a scheduler steps by epochs.
    """
    scaling = find_callback(trainer, LRScaling)
    if scaling is not None and scaling.effective_batch is None:
        return "the rate is scaled by what the first windows are measured to hold"
    by_epoch = any(
        config.interval == "epoch" for config in trainer.lr_scheduler_configs
    )
    if scaling is None and not by_epoch:
        return ""
    if has_callback(trainer.callbacks, "GradientAccumulationScheduler"):
        return "Lightning's GradientAccumulationScheduler changes the windows"
    if _stages(trainer).unit == "tokens":
        return "windows go by tokens, which are not known beforehand"
    return ""


def _run_ahead(trainer: Any) -> RatePlan:
    optimizer, schedulers = copy_schedulers(trainer)
    until = time.monotonic() + _MOST_SECONDS
    factor = _factors(trainer)
    start, end = trainer.global_step, int(total_steps(trainer))
    end = min(end, start + _MOST_STEPS)
    every = math.ceil((end - start) / _MOST_POINTS) or 1
    groups = optimizer.param_groups
    steps: list[float] = []
    rates: list[list[float]] = [[] for _ in groups]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no optimizer.step() goes before theirs
        windows = _stages(trainer).windows(trainer.num_training_batches)
        for step, (size, ends_epoch) in enumerate(islice(windows, end)):
            if step < start:
                continue
            if time.monotonic() > until:  # other ranks wait for this one
                break
            if (step - start) % every == 0 or step == end - 1:
                steps.append(step)
                for values, group in zip(rates, groups, strict=True):
                    values.append(float(group["lr"]) * factor(step, size))
            for interval, scheduler in schedulers:
                if interval == "step" or ends_epoch:
                    scheduler.step()
    if not all(math.isfinite(rate) for values in rates for rate in values):
        return RatePlan(why_not="the scheduler gives rates that are not finite")
    return RatePlan(steps, dict(zip(_rate_names(trainer), rates, strict=True)))


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
