"""W&B's engine: proposals repeat by seed, are plain Python, and see the results."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import numpy as np
import pytest

from trainkit.cli.sweep.offline.engine import Engine
from trainkit.cli.sweep.trial import State, Trial
from trainkit.errors import TrainkitError

RANGE = {"distribution": "log_uniform_values", "min": 0.0001, "max": 1.0}


def config(method: str, **parameters: Any) -> dict[str, Any]:
    metric = {"name": "loss", "goal": "minimize"}
    return {"method": method, "metric": metric, "parameters": parameters}


def proposals(engine: Engine, number: int, loss: Any = None) -> list[Any]:
    """What comes one after the other, each trial ended before the next."""
    trials: list[Trial] = []
    for n in range(number):
        arguments = engine.propose(trials)
        if arguments is None:
            break
        values = [loss(arguments)] if loss else []
        trials.append(
            Trial(name=f"t{n}", arguments=arguments, state="finished", metric=values)
        )
    return [trial.arguments for trial in trials]


def test_a_grid_is_every_combination_once_and_then_ends() -> None:
    engine = Engine(
        config("grid", lr={"values": [0.1, 1]}, b={"values": ["x", None]}), seed=0
    )

    found = proposals(engine, 9)

    assert len(found) == 4
    assert {(a["lr"], a["b"]) for a in found} == {
        (lr, b) for lr in (0.1, 1) for b in ("x", None)
    }


@pytest.mark.parametrize("method", ["random", "bayes"])
def test_the_same_seed_proposes_the_same(method: str) -> None:
    def run(seed: int) -> list[Any]:
        return proposals(Engine(config(method, lr=RANGE), seed=seed), 4, lambda a: 1.0)

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_the_programs_own_generators_are_left_alone() -> None:
    random.seed(5)
    np.random.seed(5)
    expected = random.random(), np.random.random()
    random.seed(5)
    np.random.seed(5)

    Engine(config("random", lr=RANGE), seed=0).propose([])

    assert (random.random(), np.random.random()) == expected


def test_a_bayes_search_sees_the_results() -> None:
    def best(goal_at: float) -> float:
        engine = Engine(config("bayes", x={"min": 0.0, "max": 1.0}), seed=3)
        found = proposals(engine, 14, lambda a: (a["x"] - goal_at) ** 2)
        return sum(a["x"] for a in found[-5:]) / 5

    assert best(0.1) < 0.35
    assert best(0.9) > 0.65


def test_a_bayes_search_goes_on_over_crashes() -> None:
    engine = Engine(config("bayes", lr=RANGE), seed=0)
    crashed = [Trial(name="a", arguments={"lr": 0.1}, state="crashed")]

    assert engine.propose(crashed) is not None
    crashed.append(Trial(name="b", arguments={"lr": 0.2}, state="running"))
    assert engine.propose(crashed) is not None


def test_proposals_are_plain_python_and_in_bounds() -> None:
    nested = {"parameters": {"q": {"distribution": "int_uniform", "min": 1, "max": 9}}}
    for arguments in proposals(
        Engine(config("random", lr=RANGE, opt=nested), seed=1), 20
    ):
        assert type(arguments["lr"]) is float
        assert type(arguments["opt"]["q"]) is int
        assert 0.0001 <= arguments["lr"] <= 1.0
        assert 1 <= arguments["opt"]["q"] <= 9
        assert json.loads(json.dumps(arguments)) == arguments


def test_run_cap_is_kept() -> None:
    engine = Engine({**config("random", lr=RANGE), "run_cap": 3}, seed=0)

    assert len(proposals(engine, 9)) == 3


def hyperband(good: State, poor: list[float]) -> set[str]:
    rule = {"type": "hyperband", "min_iter": 2, "eta": 2, "strict": True}
    engine = Engine({**config("random", lr=RANGE), "early_terminate": rule}, seed=0)
    return engine.to_stop(
        [
            Trial(name="a", arguments={"lr": 0.1}, state=good, metric=[1.0, 0.5, 0.4]),
            Trial(name="b", arguments={"lr": 0.1}, state=good, metric=[1.0, 0.6, 0.4]),
            Trial(name="c", arguments={"lr": 1.0}, state="running", metric=poor),
        ]
    )


def test_hyperband_stops_the_poor_one_at_its_band_only() -> None:
    assert hyperband("finished", [9.0, 8.0]) == {"c"}
    assert hyperband("stopped", [9.0, 8.0]) == {"c"}  # those stopped count
    assert hyperband("finished", [9.0]) == set()  # before its band
    assert hyperband("finished", [9.0, 0.1]) == set()


def test_without_early_terminate_nothing_is_stopped() -> None:
    trial = Trial(name="c", arguments={"lr": 1.0}, state="running", metric=[9.0] * 9)

    assert Engine(config("random", lr=RANGE), seed=0).to_stop([trial]) == set()


def test_what_the_engine_refuses_is_a_mistake_in_the_sweep() -> None:
    engine = Engine(config("grid", lr={"distribution": "normal"}), seed=0)

    with pytest.raises(TrainkitError, match="W&B's engine refuses it: ValueError"):
        engine.propose([])


def test_a_missing_engine_is_said_with_the_command_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "sweeps", None)

    with pytest.raises(
        TrainkitError, match=r"pip install 'lightning-trainkit\[sweeps\]'"
    ):
        Engine(config("random", lr=RANGE), seed=0)
