"""What a sweep reads from a server is its own runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.sweep.helpers import LR, toy
from tests.wandb_answers import answer
from tests.wandb_server import WandbServer
from trainkit.cli.sweep.online.agents import Agents
from trainkit.cli.sweep.online.server import Server
from trainkit.cli.sweep.online.sweep import OnlineSweep
from trainkit.cli.sweep.sweep_file import SweepFile


def add_run(server: WandbServer, name: str, sweep: str | None, loss: float) -> None:
    run = server.run(name)
    run.sweep, run.exit_code = sweep, 0
    run.summary = {"val/loss": loss, "_step": 1}
    run.raw_config = {"lr": {"value": 0.1}}


@pytest.fixture
def two_sweeps(wandb_server: WandbServer) -> WandbServer:
    add_run(wandb_server, "a", "sw0", 1.0)
    add_run(wandb_server, "b", "sw1", 2.0)
    add_run(wandb_server, "c", None, 3.0)
    return wandb_server


def logged_in(
    server: WandbServer,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    parameters: dict[str, Any] | None = None,
) -> Server:
    for name, value in server.env(folder).items():
        if name.startswith("WANDB_"):
            monkeypatch.setenv(name, value)
    return Server(SweepFile.read(toy(folder, parameters or {"lr": LR})))


def test_two_sweeps_of_one_project_do_not_mix(
    two_sweeps: WandbServer, private_wandb: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = logged_in(two_sweeps, private_wandb, monkeypatch)

    trials = {sweep: server.trials(sweep) for sweep in ("sw0", "sw1")}

    assert [(t.name, t.value) for t in trials["sw0"]] == [("a", 1.0)]
    assert [(t.name, t.value) for t in trials["sw1"]] == [("b", 2.0)]
    asked = [
        json.loads(request.split(b"\n", 2)[2])["variables"]["filters"]
        for request in two_sweeps.received
        if b"query Runs" in request
    ]
    assert json.loads(asked[0]) == {"$and": [{"sweep": "sw0"}]}


@pytest.mark.parametrize(
    ("logged", "arguments"),
    [
        ({"lr": None}, {"lr": None}),
        ({"a": {"b": 2}}, {"a.b": 2}),
        ({"a.b": 1, "a": {"b": 2}}, {"a.b": 1}),
    ],
)
def test_arguments_are_found_flat_or_nested_and_only_if_they_are_there(
    two_sweeps: WandbServer,
    private_wandb: Path,
    monkeypatch: pytest.MonkeyPatch,
    logged: dict[str, Any],
    arguments: dict[str, Any],
) -> None:
    two_sweeps.run("a").raw_config = {k: {"value": v} for k, v in logged.items()}
    server = logged_in(two_sweeps, private_wandb, monkeypatch, {"lr": LR, "a.b": LR})

    (trial,) = server.trials("sw0")

    assert trial.arguments == arguments


def test_news_name_the_metric_and_why_a_trial_crashed(
    two_sweeps: WandbServer, private_wandb: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_sweeps.run("a").exit_code = 1
    log = private_wandb / "agent-0.log"
    log.write_text(
        "RuntimeError: no luck\n"
        "12:36:05 - wandb.wandb_agent - INFO - Cleaning up finished run: a\n"
    )
    server = logged_in(two_sweeps, private_wandb, monkeypatch)

    assert news(server, private_wandb) == [
        "a crashed: lr=0.1, val/loss 1, RuntimeError: no luck"
    ]


def test_a_metric_that_no_trial_logs_is_told_with_those_it_did(
    two_sweeps: WandbServer, private_wandb: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_sweeps.run("a").summary = {"val/los": {"min": 2.0}, "_step": 1, "kind": "x"}
    server = logged_in(two_sweeps, private_wandb, monkeypatch)

    said = news(server, private_wandb)

    assert said[0] == "a finished: lr=0.1"
    assert "a finished and logged no val/loss" in said[1]
    assert "It logged val/los. Write" in said[1]
    (private_wandb / "agent-0.log").write_text(" - wandb.wandb_agent - INFO - Stop: a")
    assert news(server, private_wandb) == ["a finished: lr=0.1"]


def news(server: Server, folder: Path) -> list[str]:
    """What a sweep whose agents have left says at its last look."""
    said: list[str] = []
    sweep = SweepFile.read(folder / "toy.yaml")
    online = OnlineSweep(sweep, server, "sw0", folder=folder, say=said.append)
    none = Agents(server.path("sw0"), number=0, count=None, env={}, folder=folder)
    online._report_changes(none)
    return said


@pytest.mark.parametrize(
    ("filters", "names"),
    [
        ({"$and": [{"sweep": "sw1"}]}, ["b"]),
        ({"sweep": "sw1"}, ["b"]),
        ({}, ["a", "b", "c"]),
    ],
)
def test_the_stand_in_takes_both_spellings_of_a_filter(
    two_sweeps: WandbServer, filters: dict[str, Any], names: list[str]
) -> None:
    variables = {"filters": json.dumps(filters)}
    runs = answer(two_sweeps, "query Runs { }", variables)["project"]["runs"]

    assert [edge["node"]["name"] for edge in runs["edges"]] == names
