"""The table: the best first, what has no number last, nothing invented."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from trainkit.cli.sweep import table
from trainkit.cli.sweep.sweep_file import SweepFile
from trainkit.cli.sweep.trial import Trial, best_of, ranked

TRIALS = [
    Trial(name="t0", arguments={"lr": 0.1}, state="finished", metric=[3.0, 2.0]),
    Trial(name="t1", arguments={"lr": 0.01}, state="stopped", metric=[1.0]),
    Trial(name="t2", arguments={"lr": 0.5}, state="crashed", note="exit 1: [out]"),
    Trial(name="t3", arguments={"lr": 1.0}, state="finished", metric=[math.nan]),
    Trial(name="t4", arguments={"lr": 1e-5}, state="finished", metric=[1.5]),
]


def sweep(goal: str = "minimize", **parameters: Any) -> SweepFile:
    every = parameters or {"lr": {"min": 0.0, "max": 1.0}, "fixed": {"value": 1}}
    metric = {"name": "val/loss", "goal": goal}
    config = {"method": "random", "metric": metric, "parameters": every}
    return SweepFile.model_validate({**config, "program": "t.py"})


@pytest.mark.parametrize(("goal", "best"), [("minimize", "t4"), ("maximize", "t0")])
def test_the_best_is_one_that_ended_well(goal: str, best: str) -> None:
    found = best_of(TRIALS, maximizes=goal == "maximize")

    assert found is not None
    assert found.name == best


def test_without_a_number_there_is_no_best() -> None:
    assert best_of(TRIALS[2:4], maximizes=False) is None
    assert best_of([], maximizes=False) is None


def test_what_has_no_number_comes_last_either_way() -> None:
    for maximizes in (False, True):
        order = [trial.name for trial in ranked(TRIALS, maximizes=maximizes)]
        assert set(order[3:]) == {"t2", "t3"}


def test_plain_lines_show_the_swept_values_and_mark_the_best() -> None:
    assert table.lines(sweep(), TRIALS) == [
        "   trial  state     val/loss  lr     note",
        "   t1     stopped   1         0.01",
        "*  t4     finished  1.5       1e-05",
        "   t0     finished  2         0.1",
        "   t2     crashed             0.5    exit 1: [out]",
        "   t3     finished  nan       1",
    ]


def test_json_is_strict_and_complete() -> None:
    read = json.loads(
        table.as_json(sweep(), TRIALS, id="s1"),
        parse_constant=lambda name: pytest.fail(f"{name} is no JSON"),
    )

    assert (read["id"], read["best"], read["metric"]) == ("s1", "t4", "val/loss")
    assert len(read["trials"]) == len(TRIALS)
    assert {t["name"]: t["value"] for t in read["trials"]}["t3"] is None


def test_a_sweep_without_trials_has_a_table() -> None:
    assert table.lines(sweep(), []) == ["  trial  state  val/loss  lr  note"]
