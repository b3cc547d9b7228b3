"""Which sweeps lack their metric, and what the message says."""

from __future__ import annotations

from typing import Any

import pytest

from trainkit.cli.sweep.sweep_file import SweepFile
from trainkit.cli.sweep.table import lacking
from trainkit.cli.sweep.trial import State, Trial

OURS = ["trainkit", "train", "${args_no_hyphens}"]


def sweep(**config: Any) -> SweepFile:
    content = {"metric": {"name": "val/los"}, "program": "t.py", **config}
    parameters = {"lr": {"value": 1}}
    return SweepFile.model_validate(
        {"method": "random", "parameters": parameters, **content}
    )


def trial(state: State, *metric: float, name: str = "t") -> Trial:
    return Trial(name=name, arguments={}, state=state, metric=list(metric))


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


def test_the_closest_name_comes_first() -> None:
    names = [f"grad/{n}" for n in range(20)]
    lack = trial("finished")
    lack.logged = ["lr", *names, "val/loss"]
    text = lacking(sweep(), [lack])

    assert "t finished and logged no val/los" in text
    assert "It logged val/loss, " in text
    assert text.count("grad/") + text.count("lr,") == 11


def test_a_trial_of_trainkit_without_rows_needs_its_logger() -> None:
    assert "logger=wandb" in lacking(sweep(command=OURS), [trial("finished")])
    assert "logger=wandb" not in lacking(sweep(), [trial("finished")])
