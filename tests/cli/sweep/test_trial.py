"""A trial: what it logged, and its place in the table."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

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

TRIALS = [
    Trial(name="t0", arguments={"lr": 0.1}, state="finished", metric=[3.0, 2.0]),
    Trial(name="t1", arguments={"lr": 0.01}, state="stopped", metric=[1.0]),
    Trial(name="t2", arguments={"lr": 0.5}, state="crashed", note="exit 1: [out]"),
    Trial(name="t3", arguments={"lr": 1.0}, state="finished", metric=[math.nan]),
    Trial(name="t4", arguments={"lr": 1e-5}, state="finished", metric=[1.5]),
]


def sweep(**config: Any) -> SweepFile:
    parameters = {"lr": {"min": 0.0, "max": 1.0}, "fixed": {"value": 1}}
    common = {"method": "random", "program": "t.py", "metric": {"name": "val/loss"}}
    return SweepFile.model_validate({**common, "parameters": parameters, **config})


@pytest.mark.parametrize(("goal", "best"), [("minimize", "t4"), ("maximize", "t0")])
def test_the_best_has_ended_well_and_what_has_no_number_comes_last(
    goal: str, best: str
) -> None:
    metric = {"name": "val/loss", "goal": goal}
    found = best_of(sweep(metric=metric), TRIALS)
    assert found is not None
    assert found.name == best
    order = [trial.name for trial in ranked(sweep(metric=metric), TRIALS)]
    assert set(order[3:]) == {"t2", "t3"}
    for none in ([], TRIALS[2:4]):
        assert best_of(sweep(metric=metric), none) is None


def test_lines_show_the_swept_values_and_mark_the_best() -> None:
    assert table(sweep(), TRIALS) == [
        "   trial  state     val/loss  lr     note",
        "   t1     stopped   1         0.01",
        "*  t4     finished  1.5       1e-05",
        "   t0     finished  2         0.1",
        "   t2     crashed             0.5    exit 1: [out]",
        "   t3     finished  nan       1",
    ]
    assert table(sweep(), []) == ["  trial  state  val/loss  lr  note"]


def test_json_is_strict_and_complete() -> None:
    read = json.loads(
        as_json(sweep(), TRIALS, id="s1"),
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
    assert bool(lacking(sweep(), trials)) == lacks
    assert not lacking(sweep(metric=None), trials)


def test_what_lacks_the_metric_says_what_it_logged_or_needs() -> None:
    ended = trial("finished")
    ours = ["trainkit", "train", "${args_no_hyphens}"]
    assert "logger=wandb" in lacking(sweep(command=ours), [ended])
    assert "logger=wandb" not in lacking(sweep(), [ended])

    ended.logged = ["lr", *(f"grad/{n}" for n in range(20)), "val/loss"]
    text = lacking(sweep(metric={"name": "val/los"}), [ended])
    assert "t finished and logged no val/los" in text
    assert "It logged val/loss, " in text  # the closest first
    assert text.count("grad/") + text.count("lr,") == 11
