"""`trainkit train` with W&B's real client: on the disk, on a server, under an agent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes.code_lm import CodeLM
from tests.cli.training import SMALL, run_dirs, summary_of, the_run, train
from tests.cli.wandb_runs import connect, folders, records, sync, window_losses
from tests.startup import forked
from tests.wandb_server import Run, WandbServer
from trainkit.cli.runs.resume import as_trial

pytestmark = pytest.mark.usefixtures("private_wandb")


@pytest.fixture
def online(
    wandb_server: WandbServer, private_wandb: Path, monkeypatch: pytest.MonkeyPatch
) -> WandbServer:
    connect(wandb_server, monkeypatch, private_wandb)
    return wandb_server


def only_run(server: WandbServer) -> Run:
    (found,) = server.runs.values()
    return found


class Breaks(CodeLM):
    at = 1

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == self.at:
            raise RuntimeError("broken")


def test_without_an_account_the_run_is_offline_and_can_be_uploaded(
    private_wandb: Path, wandb_server: WandbServer
) -> None:
    words = ["logger=wandb", "lr_scaling=linear", "lr_scaling.reference_batch=4"]
    assert train(*words) == 0

    (folder,) = folders(the_run(private_wandb))
    assert folder.name.startswith("offline-run-")
    kinds = {record["type"] for record in records(folder)}
    assert kinds >= {"history", "metric", "exit"}

    sync(wandb_server, folder, private_wandb)
    run = only_run(wandb_server)
    assert len(window_losses(run.history)) == 2
    assert run.state == "finished"
    written = yaml.safe_load((the_run(private_wandb) / "config.yaml").read_text())
    scaling = run.config["lr_scaling"]
    assert scaling.items() >= written.pop("lr_scaling").items()
    assert scaling["k"] == 2  # what it came to stands beside
    shown = {key: entry for key, entry in written.items() if entry != {}}  # no group
    assert {key: run.config[key] for key in shown} == shown
    assert run.config["model"]["max_length"] == 128  # resolved
    batch = run.config["effective_batch"]
    assert batch["samples"] == 8
    assert batch["accumulate"] == 4
    assert batch["tokens"] > 8
    (rates,) = run.config["learning_rate"].values()
    assert rates == [pytest.approx(2 * written["optimizer"]["lr"])]  # 8 / 4, scaled


def test_a_trial_that_failed_goes_on_from_its_checkpoint_if_an_agent_gets_it_again(
    online: WandbServer, private_wandb: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SWEEP_ID", "sw0")
    monkeypatch.setenv("WANDB_RUN_ID", "trial7")
    words = ["logger=wandb", "model._target_=tests.cli.train.test_wandb.Breaks"]
    assert train(*words) == 1
    run = only_run(online)
    assert run.state == "failed"
    assert len(window_losses(run.history)) == 1

    monkeypatch.setattr(Breaks, "at", -1)
    assert train(*words) == 0
    run = only_run(online)
    assert run.name == "trial7"
    rows = [row for row in run.history if "window/loss" in row]
    assert [row["trainer/global_step"] for row in rows] == [1, 2]
    assert summary_of(the_run(private_wandb))["steps"] == 2
    words.append("experiment=demo")  # as all of these trainings
    assert as_trial(words) != words
    monkeypatch.setenv("WANDB_RUN_ID", "trial8")  # the control: another trial
    assert as_trial(words) == words


@pytest.mark.slow
def test_under_an_agent_a_stop_a_mistake_and_a_whole_training(
    wandb_server: WandbServer, private_wandb: Path
) -> None:
    """Hyperband's stop is SIGTERM to a training that would take days."""
    steps = [10_000_000, -7, 2]
    small = [word for word in SMALL if "max_steps" not in word]
    fixed = ["logger=wandb", "trainer.max_epochs=-1", "scheduler=none"]
    sweep = {
        "method": "grid",
        "metric": {"name": "val/loss", "goal": "minimize"},
        "parameters": {"trainer.max_steps": {"values": steps}},
        "early_terminate": {"type": "hyperband", "min_iter": 1},
        "command": [
            "${env}", "trainkit", "train", *small, *fixed, "${args_no_hyphens}",
        ],
    }  # fmt: skip
    (private_wandb / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    wandb_server.should_stop = lambda run: (  # the short one has as many at its end
        run.config.get("trainer.max_steps") == steps[0] and len(run.history) >= 5
    )
    env = wandb_server.env(private_wandb, **forked())

    def wandb(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "wandb", *words],
            cwd=private_wandb,
            env=env,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    assert wandb("sweep", "sweep.yaml").returncode == 0
    agent = wandb("agent", "local/p/sw0")

    assert agent.returncode == 0, agent.stderr
    ended = {
        run.config.get("trainer.max_steps"): run for run in wandb_server.runs.values()
    }
    stopped, whole = ended[steps[0]], ended[steps[2]]
    assert (stopped.state, whole.state) == ("finished", "finished")
    assert len(window_losses(whole.history)) == 2
    assert len(wandb_server.runs) == 3
    (mistaken,) = set(wandb_server.runs) - {stopped.name, whole.name}
    assert wandb_server.runs[mistaken].state == "crashed"
    by_status = {
        summary_of(path)["status"]: path
        for path in run_dirs(private_wandb)
        if (path / "summary.json").exists()
    }
    assert set(by_status) == {"interrupted", "finished"}
    assert (by_status["interrupted"] / "checkpoints" / "last.ckpt").exists()
    steps_done = summary_of(by_status["interrupted"])["steps"]
    # The rate of a step stands there with its first micro-batch already.
    windows = [row for row in stopped.history if "window/loss" in row]
    logged = [row["trainer/global_step"] for row in windows]
    assert max(logged) == steps_done  # nothing was lost when it was stopped
