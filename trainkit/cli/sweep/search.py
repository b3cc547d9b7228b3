"""What comes next in a sweep of W&B's format, and which trials are poor."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from statistics import NormalDist
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


def propose(sweep: SweepFile, trials: Sequence[Trial], seed: str) -> Trial | None:
    """The next trial, or None at the sweep's end.

    Its arguments depend only on the seed, and on how the trials before it have ended.
    """
    count, leaves = len(trials), sweep.leaves
    if count == sweep.run_cap:
        return None
    drawn: dict[str, Any] = {}
    if sweep.method == "grid":
        every = itertools.product(*map(_listed, leaves.values()))
        point = next(itertools.islice(every, count, None), None)
        if point is None:
            return None
        values = dict(zip(leaves, point, strict=True))
    else:
        drawn = _drawn(sweep, trials, random.Random(f"{seed}/{count}").getrandbits(32))
        values = {name: _value(each, drawn.get(name)) for name, each in leaves.items()}
    return Trial(name="", arguments=_nested(sweep.parameters, values), drawn=drawn)


def _drawn(sweep: SweepFile, trials: Sequence[Trial], seed: int) -> dict[str, Any]:
    """What Optuna draws; a trial that was stopped counts with its last value.

    Each proposal has a study of its own, made of all results.
    """
    spaces = {
        name: space for name, each in sweep.leaves.items() if (space := _space(each))
    }
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


def _space(parameter: Parameter) -> BaseDistribution | None:
    """What Optuna draws for a parameter: a share where it has no such distribution."""
    kind, low, high = parameter.kind.removeprefix("q_"), parameter.min, parameter.max
    if kind == "constant":
        return None
    if kind == "categorical":
        return CategoricalDistribution(range(len(parameter.values)))
    if kind == "int_uniform":
        return IntDistribution(int(low), int(high))
    if kind.endswith(("uniform", "uniform_values")):
        return FloatDistribution(low, high, log=kind.endswith("values"))
    return FloatDistribution(_EDGE, 1 - _EDGE)


def _value(parameter: Parameter, drawn: Any) -> Any:
    """The value of a parameter for what was drawn."""
    kind, values = parameter.kind.removeprefix("q_"), parameter.values
    if kind == "constant":
        return parameter.value
    if kind == "categorical":
        return values[drawn]
    if values:
        limits = itertools.accumulate(parameter.probabilities)
        pairs = zip(limits, values, strict=True)
        return next((value for at, value in pairs if drawn < at), values[-1])
    if kind.endswith("normal"):
        drawn = NormalDist(parameter.mu, parameter.sigma).inv_cdf(drawn)
    if kind in ("log_uniform", "log_normal", "inv_log_uniform"):
        drawn = math.exp(-drawn if kind.startswith("inv") else drawn)
    is_rounded = parameter.kind.startswith("q_")
    return round(drawn / parameter.q) * parameter.q if is_rounded else drawn


def _nested(
    parameters: Mapping[str, Parameter], values: Mapping[str, Any], prefix: str = ""
) -> dict[str, Any]:
    """Values by dotted name as arguments that are nested as in the file."""
    return {
        name: _nested(parameter.parameters, values, f"{prefix}{name}.")
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
