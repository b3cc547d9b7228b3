"""What comes next in a sweep of W&B's format, and which trials are poor."""

from __future__ import annotations

import itertools
import math
import random
from bisect import bisect
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
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
        every = itertools.product(*map(_all_values, leaves.values()))
        point = next(itertools.islice(every, count, None), None)
        if point is None:
            return None
        values = dict(zip(leaves, point, strict=True))
    else:
        drawn = _drawn(sweep, trials, random.Random(f"{seed}/{count}").getrandbits(32))
        values = {name: _value(each, drawn.get(name)) for name, each in leaves.items()}
    return Trial(name="", arguments=values, drawn=drawn)


def _drawn(sweep: SweepFile, trials: Sequence[Trial], seed: int) -> dict[str, Any]:
    """What Optuna draws; a trial that was stopped counts with its last value.

    Each proposal has a study of its own, made of all results. Optuna draws the place in
    a list, and of any other distribution a share from 0 to 1.
    """
    share = FloatDistribution(_EDGE, 1 - _EDGE)
    spaces: dict[str, BaseDistribution] = {
        name: CategoricalDistribution(range(len(each.values)))
        if each.kind == "categorical"
        else share
        for name, each in sweep.leaves.items()
        if each.kind != "constant"
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


def _all_values(parameter: Parameter) -> Sequence[Any]:
    """The values of a list, a constant or a range in a grid.

    >>> _all_values(Parameter(distribution="q_uniform", min=0, max=1, q=0.5))
    [0.0, 0.5, 1.0]
    """
    if not parameter.kind.endswith("uniform"):
        return parameter.listed
    num_steps = math.floor((parameter.max - parameter.min) / parameter.q + _EDGE)
    return [parameter.min + parameter.q * n for n in range(num_steps + 1)]


def _value(parameter: Parameter, drawn: Any) -> Any:
    """The value of a parameter for what was drawn."""
    kind, least, most = parameter.kind, parameter.min, parameter.max
    if kind == "constant":
        return parameter.value
    if kind == "categorical":
        return parameter.values[drawn]
    if kind == "categorical_w_probabilities":
        *limits, _ = itertools.accumulate(parameter.probabilities)
        return parameter.values[bisect(limits, drawn)]
    if kind == "int_uniform":
        return least + int(drawn * (most - least + 1))
    if kind.endswith("normal"):
        value = NormalDist(parameter.mu, parameter.sigma).inv_cdf(drawn)
    elif kind.endswith("uniform_values"):
        value = least * (most / least) ** drawn
    else:
        value = least + drawn * (most - least)
    if kind.endswith(("log_uniform", "log_normal")):  # of exponents of e
        value = math.exp(-value if kind.startswith("inv") else value)
    is_rounded = kind.startswith("q_")
    return round(value / parameter.q) * parameter.q if is_rounded else value


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
