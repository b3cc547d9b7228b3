"""What Optuna proposes for a sweep in W&B's format, and which trials it would stop.

A distribution is drawn by its quantile: Optuna searches between 0 and 1, where every
distribution is even.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import Any

import optuna
from optuna.pruners import SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.study import Study
from optuna.trial import TrialState

from trainkit.cli.sweep.parameters import leaves
from trainkit.cli.sweep.schema import Goal, Hyperband, Parameter, Sweep
from trainkit.cli.sweep.trial import Trial
from trainkit.errors import TrainkitError

optuna.logging.set_verbosity(optuna.logging.WARNING)

_NUM_RANDOM = 5
"""How many trials of a bayes search are random, before there is something to learn."""

_EDGE = 1e-9


def _between(low: float, high: float, share: float) -> float:
    return low + (high - low) * share


def _logarithmic(p: Parameter, share: float) -> float:
    return math.exp(_between(math.log(p.min), math.log(p.max), share))


def _normal(p: Parameter, share: float) -> float:
    inside = min(max(share, _EDGE), 1 - _EDGE)
    return NormalDist(p.mu, p.sigma).inv_cdf(inside)


_QUANTILES: dict[str, Callable[[Parameter, float], float]] = {
    "uniform": lambda p, share: _between(p.min, p.max, share),
    "int_uniform": lambda p, share: min(
        int(_between(p.min, p.max + 1, share)), int(p.max)
    ),
    "log_uniform": lambda p, share: math.exp(_between(p.min, p.max, share)),
    "inv_log_uniform": lambda p, share: math.exp(-_between(p.min, p.max, share)),
    "log_uniform_values": _logarithmic,
    "inv_log_uniform_values": _logarithmic,
    "normal": _normal,
    "log_normal": lambda p, share: math.exp(_normal(p, share)),
}


class Search:
    """Proposes trials, and selects those to stop.

    A proposal depends only on the seed and the trials before it. A sweep that is
    resumed after a kill therefore proposes what it would have proposed.

    Raises:
        TrainkitError: Optuna cannot run the sweep, though W&B's server can.
    """

    def __init__(self, config: Mapping[str, Any], *, seed: str) -> None:
        self._sweep = Sweep.model_validate(config)
        self._seed = seed
        metric, rule = self._sweep.metric, self._sweep.early_terminate
        self.direction: Goal = metric.goal if metric else "minimize"
        self._bands = _Bands(rule, self.direction) if rule else None
        self._parameters = config["parameters"]
        searched = {n: Parameter(**given) for n, given in leaves(self._parameters)}
        for name, parameter in searched.items():
            _refuse_what_optuna_lacks(name, parameter)
        self._points: list[dict[str, str]] | None = None
        if self._sweep.method == "grid":
            every = itertools.product(*map(_texts, searched.values()))
            self._points = [dict(zip(searched, point, strict=True)) for point in every]

    def is_over(self, num_trials: int) -> bool:
        """Whether a sweep with so many trials has no more."""
        size = None if self._points is None else len(self._points)
        ends = (self._sweep.run_cap, size)
        return any(end is not None and num_trials >= end for end in ends)

    def propose(self, study: Study, num_trials: int) -> tuple[int, dict[str, Any]]:
        """Ask a study for a trial: its number in the study, and its arguments."""
        study.sampler = self._sampler(num_trials)
        if self._points and not study.get_trials(states=[TrialState.WAITING]):
            study.enqueue_trial(self._points[num_trials])
        asked = study.ask()
        return asked.number, self._draw(asked, self._parameters)

    def to_stop(self, trials: Sequence[Trial]) -> set[str]:
        """The names of running trials that hyperband would stop now."""
        if self._bands is None:
            return set()
        running = [trial for trial in trials if trial.state == "running"]
        return {each.name for each in running if self._bands.is_poor(each, trials)}

    def _sampler(self, num_trials: int) -> BaseSampler:
        seed = random.Random(f"{self._seed}/{num_trials}").getrandbits(32)
        if self._sweep.method == "bayes":
            return TPESampler(seed=seed, n_startup_trials=_NUM_RANDOM)
        return RandomSampler(seed=seed)

    def _draw(
        self, asked: optuna.Trial, parameters: Mapping[str, Any], prefix: str = ""
    ) -> dict[str, Any]:
        drawn = {}
        for name, given in parameters.items():
            parameter, place = Parameter(**given), prefix + name
            if parameter.parameters:
                drawn[name] = self._draw(asked, given["parameters"], f"{place}.")
            elif parameter.kind == "categorical" or self._points is not None:
                text = asked.suggest_categorical(place, _texts(parameter))
                drawn[name] = json.loads(text)
            elif parameter.kind == "constant":
                drawn[name] = parameter.value
            else:
                share = asked.suggest_float(place, 0.0, 1.0)
                drawn[name] = _quantile(parameter, share)
        return drawn


def _refuse_what_optuna_lacks(name: str, parameter: Parameter) -> None:
    if parameter.kind.endswith("beta"):
        raise TrainkitError(
            f"trainkit sweep --offline parameters.{name}: distribution "
            f"{parameter.kind} is drawn by W&B's server only. Choose another, or leave "
            f"--offline out."
        )


def _texts(parameter: Parameter) -> list[str]:
    """The values of a list, a constant or a range in a grid, as JSON, each once.

    >>> _texts(Parameter(min=1, max=3)), _texts(Parameter(values=[1, True, 1, "a"]))
    (['1', '2', '3'], ['1', 'true', '"a"'])
    """
    values = parameter.values
    if parameter.kind == "constant":
        values = [parameter.value]
    elif "min" in parameter.model_fields_set:
        step = 1 if parameter.kind == "int_uniform" else parameter.q
        num_steps = math.floor((parameter.max - parameter.min) / step + _EDGE)
        values = [parameter.min + step * n for n in range(num_steps + 1)]
    return list(dict.fromkeys(map(json.dumps, values)))


def _quantile(parameter: Parameter, share: float) -> Any:
    """The value below which a share of the distribution lies.

    >>> _quantile(Parameter(min=1, max=3), 0.5)
    2
    >>> _quantile(Parameter(distribution="q_normal", mu=1, sigma=2, q=0.5), 0.5)
    1.0
    """
    if parameter.probabilities:
        limits = itertools.accumulate(parameter.probabilities)
        pairs = zip(limits, parameter.values, strict=True)
        return next((v for limit, v in pairs if share < limit), parameter.values[-1])
    value = _QUANTILES[parameter.kind.removeprefix("q_")](parameter, share)
    if parameter.kind.startswith("q_"):
        return round(value / parameter.q) * parameter.q
    return value


class _Bands:
    """W&B's hyperband as successive halving, on the values that trials have logged.

    With `strict` a trial's value at a band counts, and else its best until there.

    Raises:
        TrainkitError: `eta` is not a whole number from 2.
    """

    def __init__(self, rule: Hyperband, direction: Goal) -> None:
        if not isinstance(rule.eta, int):
            raise TrainkitError(
                f"trainkit sweep --offline early_terminate.eta: must be a whole number "
                f"from 2, received {rule.eta!r}. Write 2 or 3, or leave --offline out."
            )
        least, end = rule.min_iter or 1, sys.maxsize
        if rule.min_iter is None and rule.max_iter and rule.s:
            least, end = max(1, rule.max_iter // rule.eta**rule.s), rule.max_iter
        self._direction: Goal = direction
        self._pruner = SuccessiveHalvingPruner(least, rule.eta)
        powers = (least * rule.eta**n for n in itertools.count())
        self._bands = list(itertools.takewhile(lambda band: band < end, powers))
        self._is_strict = rule.strict

    def is_poor(self, trial: Trial, trials: Sequence[Trial]) -> bool:
        """Whether the last band that a trial has reached would stop it."""
        study = optuna.create_study(direction=self._direction, pruner=self._pruner)
        verdict = False
        for each in [*(t for t in trials if t is not trial), trial]:
            verdict = False
            played = study.ask()
            for band, value in self._values(each):
                played.report(value, band)
                verdict = played.should_prune()
        return verdict

    def _values(self, trial: Trial) -> list[tuple[int, float]]:
        """What counts of a trial at each band that it has reached."""
        better = max if self._direction == "maximize" else min
        metric = [value for value in trial.metric if math.isfinite(value)]
        reached = itertools.takewhile(lambda band: band <= len(metric), self._bands)
        return [
            (n, metric[n - 1] if self._is_strict else better(metric[:n]))
            for n in reached
        ]
