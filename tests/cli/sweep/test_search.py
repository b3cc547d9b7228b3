"""What Optuna proposes, the command line of a trial, and its place in the table."""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given
from hypothesis import strategies as st

from trainkit.cli.sweep.offline import command_line
from trainkit.cli.sweep.search import is_poor, propose
from trainkit.cli.sweep.sweep_file import SweepFile
from trainkit.cli.sweep.trial import (
    State,
    Trial,
    as_json,
    best_of,
    lacking,
    ranked,
    table,
)
from trainkit.cli.sweep.whole_config import hydra_text

RANGE = {"distribution": "log_uniform_values", "min": 0.0001, "max": 1.0}
TAKEN: list[dict[str, Any]] = [
    {"distribution": "constant", "value": 2},
    {"distribution": "categorical", "values": [1, 2]},
    {"distribution": "int_uniform", "min": 1, "max": 3},
    {"distribution": "q_log_uniform_values", "min": 0.1, "max": 3.0, "q": 0.1},
    {"distribution": "log_uniform", "min": -9, "max": 1},
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
        elif SweepFile.model_validate(sweep).parameters["lr"].kind == "int_uniform":
            assert type(arguments["lr"]) is int


def test_a_grid_is_every_combination_once_in_order_and_then_ends() -> None:
    b = {"opt.b": {"values": ["x", None]}}
    grid = config("grid", n={"values": [1, 2]}, **b, c={"value": [1]})
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


ARGUMENTS = {"lr": 0.1, "flag": True, "off": False}
SHORT = ["".join(w) for n in range(5) for w in itertools.product("\\'a,", repeat=n)]
SCALARS = (
    st.text("\\'\"ab1e ,=:$")
    | st.text(st.characters(codec="ascii", categories=["L", "N", "P", "S", "Zs"]))
    .filter(lambda text: "${" not in text)
    | st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
)  # fmt: skip


def sweep(*command: str, **config: Any) -> SweepFile:
    parameters = {"lr": {"value": 1}}
    common = {"method": "random", "parameters": parameters, "program": "t.py"}
    return SweepFile.model_validate({**common, "command": list(command), **config})


@example(SHORT)
@given(SCALARS | st.lists(SCALARS, max_size=3))
def test_hydra_reads_back_what_was_written(value: Any) -> None:
    override = OverridesParser.create().parse_override(f"key={hydra_text(value)}")
    read = _plain(override.value())
    assert read == value
    assert type(read) is type(value)
    # The control: what an agent writes for None is a text to Hydra.
    assert OverridesParser.create().parse_override("key=None").value() == "None"


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value.text if hasattr(value, "text") else value


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("${args_json_file}", ["{folder}/arguments.json"]),
        ("${env}", ["/usr/bin/env"]),
        ("${interpreter}", [sys.executable]),
        ("${program}", ["t.py"]),
        ("--gpu=${envvar:TRAINKIT_TEST_GPU}", ["--gpu=3"]),
        ("${args_no_hyphens}", ["lr=0.1", "flag=True", "off=False", "more"]),
        ("${args_no_boolean_flags}", ["--lr=0.1", "--flag"]),
    ],
)
def test_command_line_is_the_agents(
    word: str, words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRAINKIT_TEST_GPU", "3")
    found = command_line(sweep(word), ARGUMENTS, tmp_path, more=["more"])
    assert found == [each.replace("{folder}", str(tmp_path)) for each in words]
    assert json.loads((tmp_path / "arguments.json").read_text()) == ARGUMENTS


@pytest.mark.parametrize(
    ("config", "is_one"),
    [
        ({"command": ["${env}", "/opt/bin/trainkit", "train"]}, True),
        ({"command": ["${interpreter}", "-m", "trainkit", "train"]}, True),
        ({"program": "trainkit", "command": ["${program}", "train"]}, True),
        ({"command": ["trainkit", "fit"]}, False),
        ({"program": "trainkit.py"}, False),
    ],
)
def test_trainkit_train_is_recognised(config: dict[str, Any], is_one: bool) -> None:
    words = [*config.pop("command", ["${program}"]), "${args_no_hyphens}"]
    assert sweep(*words, **config).runs_trainkit is is_one


# ---- a trial: what it logged, and its place in the table -----------------------------


TRIALS = [
    Trial(name="t0", arguments={"lr": 0.1}, state="finished", metric=[3.0, 2.0]),
    Trial(name="t1", arguments={"lr": 0.01}, state="stopped", metric=[1.0]),
    Trial(name="t2", arguments={"lr": 0.5}, state="crashed", note="exit 1: [out]"),
    Trial(name="t3", arguments={"lr": 1.0}, state="finished", metric=[math.nan]),
    Trial(name="t4", arguments={"lr": 1e-5}, state="finished", metric=[1.5]),
]


def sweep_of(**config: Any) -> SweepFile:
    parameters = {"lr": {"min": 0.0, "max": 1.0}, "fixed": {"value": 1}}
    common = {"method": "random", "program": "t.py", "metric": {"name": "val/loss"}}
    return SweepFile.model_validate({**common, "parameters": parameters, **config})


@pytest.mark.parametrize(("goal", "best"), [("minimize", "t4"), ("maximize", "t0")])
def test_the_best_has_ended_well_and_what_has_no_number_comes_last(
    goal: str, best: str
) -> None:
    metric = {"name": "val/loss", "goal": goal}
    found = best_of(sweep_of(metric=metric), TRIALS)
    assert found is not None
    assert found.name == best
    order = [trial.name for trial in ranked(sweep_of(metric=metric), TRIALS)]
    assert set(order[3:]) == {"t2", "t3"}
    for none in ([], TRIALS[2:4]):
        assert best_of(sweep_of(metric=metric), none) is None


def test_lines_show_the_swept_values_and_mark_the_best() -> None:
    assert table(sweep_of(), TRIALS).splitlines() == [
        "   trial  state     val/loss  lr     note",
        "   t1     stopped   1         0.01",
        "*  t4     finished  1.5       1e-05",
        "   t0     finished  2         0.1",
        "   t2     crashed             0.5    exit 1: [out]",
        "   t3     finished  nan       1",
    ]
    assert table(sweep_of(), []) == "  trial  state  val/loss  lr  note"


def test_json_is_strict_and_complete() -> None:
    read = json.loads(
        as_json(sweep_of(), TRIALS, id="s1"),
        parse_constant=lambda name: pytest.fail(f"{name} is no JSON"),
    )
    assert (read["id"], read["best"], read["metric"]) == ("s1", "t4", "val/loss")
    assert len(read["trials"]) == len(TRIALS)
    assert {t["name"]: t["value"] for t in read["trials"]}["t3"] is None


def trial(state: State, *metric: float) -> Trial:
    return Trial(name="t", arguments={}, state=state, metric=list(metric))


@pytest.mark.parametrize(
    ("trials", "lacks"),
    [
        ([trial("finished")], True),
        ([trial("crashed"), trial("finished")], True),
        ([trial("crashed"), trial("stopped"), trial("running")], False),
        ([trial("finished", 1.0), trial("finished")], False),
        ([trial("finished"), trial("running", 1.0)], False),
        ([], False),
    ],
)
def test_only_a_finished_trial_tells_and_only_where_none_has_a_value(
    trials: list[Trial], lacks: bool
) -> None:
    assert bool(lacking(sweep_of(), trials)) == lacks
    assert not lacking(sweep_of(metric=None), trials)


def test_what_lacks_the_metric_says_what_it_logged_or_needs() -> None:
    ended = trial("finished")
    ours = ["trainkit", "train", "${args_no_hyphens}"]
    assert "logger=wandb" in lacking(sweep_of(command=ours), [ended])
    assert "logger=wandb" not in lacking(sweep_of(), [ended])
    ended.logged = ["lr", *(f"grad/{n}" for n in range(20)), "val/loss"]
    text = lacking(sweep_of(metric={"name": "val/los"}), [ended])
    assert "t finished and logged no val/los" in text
    assert "It logged val/loss, " in text  # the closest first
    assert text.count("grad/") + text.count("lr,") == 11
