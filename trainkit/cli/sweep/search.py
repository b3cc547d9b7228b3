"""What Optuna tries next in a sweep of W&B's format, and which trials are poor."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

import optuna
from optuna.samplers import BaseSampler, RandomSampler, TPESampler

from trainkit.cli.sweep.sweep_file import Parameter, SweepFile
from trainkit.cli.sweep.trial import Trial
from trainkit.errors import TrainkitError

_NUM_RANDOM = 5
"""How many trials of a bayes search are random, before there is something to learn."""

_EDGE = 1e-9


def refuse_what_optuna_lacks(sweep: SweepFile) -> None:
    """Refuse a distribution that only W&B's server draws."""
    for name, parameter in sweep.leaves.items():
        if parameter.kind.endswith("beta"):
            raise TrainkitError(
                f"trainkit sweep --offline parameters.{name}: distribution "
                f"{parameter.kind} is drawn by W&B's server only. Choose another, or "
                f"leave --offline out."
            )


def sampler(sweep: SweepFile, seed: str) -> BaseSampler:
    """The sampler of the next trial; equal seeds and results give equal trials."""
    number = random.Random(seed).getrandbits(32)
    if sweep.method == "bayes":
        return TPESampler(seed=number, n_startup_trials=_NUM_RANDOM)
    return RandomSampler(seed=number)


def grid(sweep: SweepFile) -> list[dict[str, Any]]:
    """Every combination of values, by dotted name."""
    every = itertools.product(*map(_listed, sweep.leaves.values()))
    return [dict(zip(sweep.leaves, values, strict=True)) for values in every]


def _listed(parameter: Parameter) -> Sequence[Any]:
    """The values of a list, a constant or a range in a grid.

    >>> _listed(Parameter(distribution="q_uniform", min=0, max=1, q=0.5))
    [0.0, 0.5, 1.0]
    """
    if "min" not in parameter.takes:
        return parameter.values or [parameter.value]
    step = 1 if parameter.kind == "int_uniform" else parameter.q
    num_steps = math.floor((parameter.max - parameter.min) / step + _EDGE)
    return [parameter.min + step * n for n in range(num_steps + 1)]


def draw(asked: optuna.Trial, name: str, parameter: Parameter) -> Any:
    """The value that Optuna proposes for a parameter."""
    kind, low, high = parameter.kind.removeprefix("q_"), parameter.min, parameter.max
    if kind == "constant":
        return parameter.value
    if kind == "categorical":
        places = range(len(parameter.values))
        return parameter.values[asked.suggest_categorical(name, places)]
    if kind == "int_uniform":
        return asked.suggest_int(name, int(low), int(high))
    if kind.endswith("uniform_values"):
        value = asked.suggest_float(name, low, high, log=True)
    elif kind.endswith("uniform"):
        value = asked.suggest_float(name, low, high)
    else:
        share = asked.suggest_float(name, _EDGE, 1 - _EDGE)
        if parameter.values:
            limits = itertools.accumulate(parameter.probabilities)
            pairs = zip(limits, parameter.values, strict=True)
            return next((v for at, v in pairs if share < at), parameter.values[-1])
        value = NormalDist(parameter.mu, parameter.sigma).inv_cdf(share)
    if kind in ("log_uniform", "log_normal", "inv_log_uniform"):
        value = math.exp(-value if kind.startswith("inv") else value)
    is_rounded = parameter.kind.startswith("q_")
    return round(value / parameter.q) * parameter.q if is_rounded else value


def nested(
    parameters: Mapping[str, Parameter], values: Mapping[str, Any], prefix: str = ""
) -> dict[str, Any]:
    """Values by dotted name as arguments that are nested as in the file."""
    return {
        name: nested(parameter.parameters, values, f"{prefix}{name}.")
        if parameter.parameters
        else values[f"{prefix}{name}"]
        for name, parameter in parameters.items()
    }


def is_poor(sweep: SweepFile, trial: Trial, trials: Sequence[Trial]) -> bool:
    """Whether hyperband stops a trial, as successive halving does.

    At the last band that it has reached, it must be in the best share, 1 / eta, of all
    trials that have reached it. With `strict` a trial's value at the band counts, and
    else its best until there.
    """
    rule, sign = sweep.early_terminate, -1 if sweep.maximizes else 1
    if rule is None:
        return False
    losses = {
        each.name: [sign * value for value in each.metric if math.isfinite(value)]
        for each in trials
    }
    band, next_band, end = 0, float(rule.min_iter or 0), math.inf
    if rule.max_iter and rule.s and not next_band:
        next_band, end = max(1, rule.max_iter / rule.eta**rule.s), rule.max_iter
    while next_band < end and int(next_band) <= len(losses[trial.name]):
        band, next_band = int(next_band), next_band * rule.eta
    there = {
        name: each[band - 1] if rule.strict else min(each[:band])
        for name, each in losses.items()
        if 0 < band <= len(each)
    }
    num_good = max(int(len(there) / rule.eta), 1)
    return bool(band) and there[trial.name] > sorted(there.values())[num_good - 1]
