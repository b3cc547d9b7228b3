"""What Optuna proposes: repeats by seed, is plain, in bounds, and sees the results."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trainkit.cli.sweep.sweep_file import SweepFile
from trainkit.cli.sweep.trial import State, Trial

pytest.importorskip("optuna")
from trainkit.cli.sweep.search import is_poor, propose

RANGE = {"distribution": "log_uniform_values", "min": 0.0001, "max": 1.0}
TAKEN: list[dict[str, Any]] = [
    {"distribution": "constant", "value": 2},
    {"distribution": "categorical", "values": [1, 2]},
    {"distribution": "normal"},
    {"distribution": "q_normal", "mu": 0, "sigma": 1, "q": 0.5},
    {"distribution": "int_uniform", "min": 1, "max": 3},
    {"distribution": "q_log_uniform_values", "min": 0.1, "max": 3.0, "q": 0.1},
    {"distribution": "inv_log_uniform_values", "min": 0.1, "max": 0.9},
    {"values": [1, 2], "probabilities": [0.2, 0.8]},
    {"values": [1, 2, 3], "probabilities": [0.1, 0.2, 0.7]},
    {"min": 1, "max": 3},
    {"min": 1.5, "max": 3},
]


def config(method: str, **parameters: Any) -> dict[str, Any]:
    metric = {"name": "loss", "goal": "minimize"}
    common = {"metric": metric, "program": "t.py"}
    return {**common, "method": method, "parameters": parameters}


def proposals(
    sweep: dict[str, Any], number: int, *, seed: str = "1", loss: Any = None
) -> list[Any]:
    """What comes one after the other, each trial ended before the next."""
    trials: list[Trial] = []
    for _ in range(number):
        trial = propose(SweepFile.model_validate(sweep), trials, seed)
        if trial is None:
            break
        trial.state = "finished"
        trial.metric = [loss(trial.arguments) if loss else 1.0]
        trials.append(trial)
    return [trial.arguments for trial in trials]


@pytest.mark.parametrize("parameter", TAKEN)
def test_each_distribution_is_drawn(parameter: dict[str, Any]) -> None:
    sweep = config("random", lr=parameter)
    for arguments in proposals(sweep, 9):
        low, high = parameter.get("min", -9), parameter.get("max", 9)
        assert low <= arguments["lr"] <= high
        assert json.loads(json.dumps(arguments)) == arguments
        if "values" in parameter:
            assert arguments["lr"] in parameter["values"]
        elif all(isinstance(each, int) for each in (low, high)) and "min" in parameter:
            assert type(arguments["lr"]) is int


def test_probabilities_are_kept() -> None:
    rare = {"values": ["a", "b"], "probabilities": [0.9, 0.1]}
    found = [each["k"] for each in proposals(config("random", k=rare), 80)]
    assert 60 <= found.count("a") < 80


def test_a_grid_is_every_combination_once_in_order_and_then_ends() -> None:
    nested = {"parameters": {"b": {"values": ["x", None]}}}
    grid = config("grid", n={"min": 1, "max": 2}, opt=nested, c={"value": [1]})

    found = proposals(grid, 9)

    pairs = [(n, b) for n in (1, 2) for b in ("x", None)]
    assert found == [{"n": n, "opt.b": b, "c": [1]} for n, b in pairs]
    assert len(proposals({**grid, "run_cap": 3}, 9)) == 3


@pytest.mark.parametrize("method", ["random", "bayes"])
def test_the_same_seed_proposes_the_same(method: str) -> None:
    def run(seed: str) -> list[Any]:
        return proposals(config(method, lr=RANGE), 7, seed=seed)

    assert run("1") == run("1")
    assert run("1") != run("2")


def test_a_bayes_search_sees_the_results() -> None:
    def mean(goal_at: float, method: str) -> float:
        sweep = config(method, x={"min": 0.0, "max": 1.0})
        found = proposals(sweep, 30, seed="3", loss=lambda a: (a["x"] - goal_at) ** 2)
        return sum(a["x"] for a in found[-10:]) / 10

    assert mean(0.1, "bayes") < 0.3
    assert mean(0.9, "bayes") > 0.7
    assert 0.3 < mean(0.1, "random") < 0.7  # the control


@pytest.mark.parametrize(
    ("values", "rule", "poor"),
    [
        ([9.0, 8.0], {}, True),
        ([9.0], {}, False),  # before its band
        ([9.0, 0.1], {}, False),
        ([0.1, 9.0], {}, True),
        ([0.1, 9.0], {"strict": False}, False),  # its best counts
        ([9.0, 8.0], {"eta": 1.5}, True),
        ([9.0, 8.0], {"min_iter": None, "max_iter": 8, "s": 2}, True),  # 8 / 2**2
        ([9.0, 8.0], {"min_iter": None, "max_iter": 8, "s": 1}, False),
    ],
)
@pytest.mark.parametrize("state", ["finished", "stopped"])  # those stopped count
@pytest.mark.parametrize("sign", [1, -1])
def test_hyperband_stops_the_poor_one_at_its_band_only(
    values: list[float], rule: dict[str, Any], poor: bool, state: State, sign: int
) -> None:
    rule = {"type": "hyperband", "min_iter": 2, "eta": 2, "strict": True, **rule}
    metric = {"name": "loss", "goal": "minimize" if sign == 1 else "maximize"}
    common = {**config("random", lr=RANGE), "metric": metric}
    sweep = SweepFile.model_validate({**common, "early_terminate": rule})
    logged = {"a": [1, 0.5, 0.4], "b": [1, 0.6, 0.4], "c": values}
    trials = [
        Trial(name=name, arguments={}, state=state, metric=[sign * v for v in each])
        for name, each in logged.items()
    ]
    assert is_poor(sweep, trials[2], trials) is poor
    assert not (poor and is_poor(sweep, trials[0], trials))
