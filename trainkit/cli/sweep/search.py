"""What comes next in a sweep of W&B's format, and which trials are poor."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import BaseSampler, RandomSampler, TPESampler

from trainkit.cli.sweep.sweep_file import Parameter, SweepFile
from trainkit.cli.sweep.trial import Trial
from trainkit.errors import TrainkitError

optuna.logging.set_verbosity(optuna.logging.WARNING)

_NUM_RANDOM = 5
"""How many trials of a bayes search are random, before there is something to learn."""


def spaces_of(sweep: SweepFile) -> dict[str, BaseDistribution]:
    """What Optuna draws for each parameter that is not constant.

    Of a list that is the place; a value of `q_...` is rounded afterwards.

    Raises:
        TrainkitError: a distribution that only W&B's server draws.
    """
    every = sweep.parameters.items()
    return {name: _space(name, p) for name, p in every if p.kind != "constant"}


def _space(name: str, parameter: Parameter) -> BaseDistribution:
    low, high = parameter.min, parameter.max
    kind = parameter.kind.removeprefix("q_")
    if kind == "categorical":
        return CategoricalDistribution(range(len(parameter.values)))
    if kind == "int_uniform":
        return IntDistribution(low, high)
    if kind == "uniform":
        return FloatDistribution(low, high)
    if kind == "log_uniform_values":
        return FloatDistribution(low, high, log=True)
    if kind == "log_uniform":
        return FloatDistribution(math.exp(low), math.exp(high), log=True)
    raise TrainkitError(
        f"trainkit sweep --offline parameters.{name}: distribution {parameter.kind} is "
        f"drawn by W&B's server only. Choose another, or leave --offline out."
    )


def propose(sweep: SweepFile, trials: Sequence[Trial], seed: str) -> Trial | None:
    """The next trial, or None at the sweep's end.

    Its arguments depend only on the seed, and on how the trials before it have ended.
    """
    count, parameters = len(trials), sweep.parameters
    if count == sweep.run_cap:
        return None
    if sweep.method == "grid":
        every = itertools.product(*(each.listed for each in parameters.values()))
        for point in itertools.islice(every, count, count + 1):
            values = dict(zip(parameters, point, strict=True))
            return Trial(name="", arguments=values)
        return None
    drawn = _drawn(sweep, trials, random.Random(f"{seed}/{count}").getrandbits(32))
    values = {name: _value(each, drawn.get(name)) for name, each in parameters.items()}
    return Trial(name="", arguments=values, drawn=drawn)


def _drawn(sweep: SweepFile, trials: Sequence[Trial], seed: int) -> dict[str, Any]:
    """What Optuna draws, by a study of its own that is made of all results.

    A trial that was stopped counts with its last value.
    """
    spaces = spaces_of(sweep)
    sampler: BaseSampler = RandomSampler(seed=seed)
    if sweep.method == "bayes":
        sampler = TPESampler(seed=seed, n_startup_trials=_NUM_RANDOM)
    direction = "maximize" if sweep.maximizes else "minimize"
    study = optuna.create_study(sampler=sampler, direction=direction)
    for trial in trials:
        if trial.state in ("finished", "stopped") and trial.number is not None:
            known = {"params": trial.drawn, "distributions": spaces}
            study.add_trial(optuna.create_trial(value=trial.number, **known))
    return study.ask(spaces).params


def _value(parameter: Parameter, drawn: Any) -> Any:
    """The value of a parameter for what was drawn."""
    if parameter.kind == "constant":
        return parameter.value
    if parameter.kind == "categorical":
        return parameter.values[drawn]
    is_rounded = parameter.kind.startswith("q_")
    return round(drawn / parameter.q) * parameter.q if is_rounded else drawn


def is_poor(sweep: SweepFile, trial: Trial, trials: Sequence[Trial]) -> bool:
    """Whether hyperband stops a trial, as successive halving does.

    At the last band that it has reached, it must be in the best share, 1 / eta, of all
    trials that have reached it. With `strict` a trial's value at the band counts, and
    else its best until there.
    """
    rule, sign = sweep.early_terminate, -1 if sweep.maximizes else 1
    if rule is None:
        return False
    next_band, end = float(rule.min_iter or 0), math.inf
    if rule.max_iter and rule.s and not next_band:
        next_band, end = max(1, rule.max_iter / rule.eta**rule.s), rule.max_iter
    losses = {
        each.name: [sign * value for value in each.metric if math.isfinite(value)]
        for each in trials
    }
    band = 0
    while next_band < end and int(next_band) <= len(losses[trial.name]):
        band, next_band = int(next_band), next_band * rule.eta
    there = {
        name: each[band - 1] if rule.strict else min(each[:band])
        for name, each in losses.items()
        if 0 < band <= len(each)
    }
    num_good = max(int(len(there) / rule.eta), 1)
    return bool(band) and there[trial.name] > sorted(there.values())[num_good - 1]
