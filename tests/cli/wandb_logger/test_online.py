"""Whether a run is online, what it keeps to itself, and trainings of the command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import wandb
import yaml

from tests.cli import training
from tests.cli.training import SMALL, run_dirs, summary_of, the_run
from tests.cli.wandb_runs import (
    connect,
    folders,
    only_run,
    records,
    sync,
    window_losses,
)
from tests.startup import ended, forked
from tests.wandb_server import WandbServer, wait_until
from trainkit import WandbRunLogger
from trainkit.cli.runs.resume import as_trial
from trainkit.cli.wandb_logger import resolve_mode
from trainkit.errors import TrainkitError

KEY = "local" + 35 * "x"
REFUSED = "mode: online needs a login for https?://"


@pytest.mark.parametrize(
    ("mode", "environ", "expected"),
    [
        ("auto", {}, "offline"),
        ("auto", {"WANDB_API_KEY": KEY}, "online"),
        ("auto", {"WANDB_API_KEY": KEY, "WANDB_MODE": "offline"}, "offline"),
        ("auto", {"WANDB_SWEEP_ID": "s", "WANDB_MODE": "dryrun"}, "offline"),
        ("auto", {"WANDB_MODE": "disabled"}, "disabled"),
        ("offline", {"WANDB_API_KEY": KEY, "WANDB_MODE": "online"}, "offline"),
        ("online", {"WANDB_API_KEY": KEY, "WANDB_MODE": "offline"}, "online"),
        # Without a login it is refused, instead of asking for one.
        ("online", {}, REFUSED),
        ("auto", {"WANDB_MODE": "online"}, REFUSED),
        ("auto", {"WANDB_SWEEP_ID": "s"}, REFUSED),
    ],
)
@pytest.mark.usefixtures("private_wandb")
def test_mode_by_the_environment(
    monkeypatch: pytest.MonkeyPatch, mode: Any, environ: dict[str, str], expected: str
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    if expected == REFUSED:
        with pytest.raises(TrainkitError, match=REFUSED):
            resolve_mode(mode)
    else:
        assert resolve_mode(mode) == expected


@pytest.mark.parametrize("where", ["home", "variable"])
def test_a_login_for_this_server_is_found(
    private_wandb: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    path = Path.home() / ".netrc" if where == "home" else private_wandb / "other"
    path.write_text(f"machine wandb.here\n  login user\n  password {KEY}\n")
    path.chmod(0o600)
    if where == "variable":
        monkeypatch.setenv("NETRC", str(path))
    assert resolve_mode("auto") == "offline"  # that is another server's
    wandb.teardown()  # the client reads its settings once
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.here")
    assert resolve_mode("auto") == "online"
    path.write_text("machine wandb.here login user")  # it holds no password
    assert resolve_mode("auto") == "offline"


def test_wandb_offline_is_remembered(
    private_wandb: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the environment says otherwise."""
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    subprocess.run([sys.executable, "-m", "wandb", "offline"], check=True, timeout=240)
    assert resolve_mode("auto") == "offline"
    monkeypatch.setenv("WANDB_MODE", "run")
    assert resolve_mode("auto") == "online"


SECRET, VARIABLE, ARGUMENT, PASSWORD = "s3cretvalue plainvalue argvalue pwvalue".split()

TRAINING = """
import sys
import wandb
from trainkit import WandbRunLogger
from trainkit.config.redact import public_config

print("printed s3cretvalue")
config = {
    "hub": {"api_key": "s3cretvalue", "url": "https://me:pwvalue@host/x"},
    "home": "${oc.env:MY_VARIABLE}",
    "below": "${home}/data",
    "note": "with s3cretvalue inside",
    "lr": 0.1,
}
if sys.argv[1] == "trainkit":
    logger = WandbRunLogger(save_dir="run")
    logger.log_hyperparams(public_config(config))
    logger.log_metrics({"x": 1.0}, step=0)
    logger.finalize("success")
else:
    with wandb.init(dir="run", config={"note": "with s3cretvalue inside"}) as run:
        run.log({"x": 1.0})
"""


def found(word: str, server: WandbServer, folder: Path) -> list[str]:
    """Where a word is: requests, and files under a folder."""
    needle = word.encode()
    requests = [r.split(b"\n")[0].decode() for r in server.received if needle in r]
    files = [p for p in folder.rglob("*") if p.is_file() and needle in p.read_bytes()]
    return requests + [str(p) for p in files]


def train(kind: str, server: WandbServer, folder: Path, mode: str) -> None:
    """Train in a process."""
    git = ["git", "-c", "init.defaultBranch=main"]
    remote = "https://me:pwvalue@github.com/a/b.git"
    assert ended([*git, "init", "-q"], folder, os.environ).returncode == 0
    ended([*git, "remote", "add", "origin", remote], folder, os.environ)
    (folder / "run").mkdir(exist_ok=True)
    (folder / "train.py").write_text(TRAINING)
    env = server.env(
        folder,
        **forked(),
        MY_API_KEY=SECRET,
        MY_VARIABLE=VARIABLE,
        SLURM_JOB_ID="1",
        SLURM_MY_TOKEN=SECRET,
        WANDB_MODE=mode,
        WANDB_ERROR_REPORTING="true",  # what is sent by default
    )
    command = [sys.executable, "train.py", kind, f"password={ARGUMENT}"]
    done = ended(command, folder, env)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["online", "offline"])
def test_nothing_secret_is_sent_or_written(
    wandb_server: WandbServer, tmp_path: Path, mode: str
) -> None:
    train("trainkit", wandb_server, tmp_path, mode)
    key = wandb_server.env(tmp_path)["WANDB_API_KEY"]
    for word in (SECRET, VARIABLE, ARGUMENT, PASSWORD, key):
        assert found(word, wandb_server, tmp_path / "run") == []
    if mode == "online":
        (run,) = wandb_server.runs.values()
        assert run.config == {
            "hub": {"api_key": "<redacted>", "url": "https://<redacted>@host/x"},
            "home": "${oc.env:MY_VARIABLE}",
            "below": "${oc.env:MY_VARIABLE}/data",
            "note": "with <redacted> inside",
            "lr": 0.1,
        }


@pytest.mark.slow
def test_the_plain_client_sends_what_is_searched_for(
    wandb_server: WandbServer, tmp_path: Path
) -> None:
    """Or the search above would prove nothing."""
    train("plain", wandb_server, tmp_path, "online")
    for word in (SECRET, ARGUMENT):
        assert found(word, wandb_server, tmp_path / "run")


DYING = """
import pathlib, sys, time
from trainkit import WandbRunLogger

logger = WandbRunLogger(save_dir="run", finish_timeout=0.5)
for step in range(20):
    logger.log_metrics({"x": float(step)}, step=step)
    while step == 9 and not pathlib.Path("go").exists():
        time.sleep(0.02)
logger.finalize("success")
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.slow
def test_a_server_that_dies_in_mid_run_costs_seconds_and_no_row(
    wandb_server: WandbServer, tmp_path: Path
) -> None:
    """Without a bound the client goes on trying, for hours."""
    (tmp_path / "training.py").write_text(DYING)
    command = [sys.executable, "training.py", "3"]
    env = wandb_server.env(tmp_path, **forked())
    child = subprocess.Popen(
        command, env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_until(
            lambda: any(len(r.history) == 10 for r in wandb_server.runs.values())
        )
        wandb_server.die()
        (tmp_path / "go").touch()
        _, said = child.communicate(timeout=240)
    finally:
        child.kill()
        child.communicate()
    (folder,) = folders(tmp_path / "run")
    assert child.returncode == 3
    assert f"wandb sync --include-online {folder}" in said
    assert [len(run.history) for run in wandb_server.runs.values()] == [10]
    wandb_server.revive()
    sync(wandb_server, folder, tmp_path)
    (run,) = wandb_server.runs.values()
    assert [row["x"] for row in run.history] == list(range(20))
    assert run.state == "finished"


@pytest.mark.slow
def test_a_server_that_is_not_there_at_the_start_makes_the_run_offline(
    wandb_server: WandbServer,
    private_wandb: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    connect(wandb_server, monkeypatch, private_wandb)
    # Twice before that the client asks who it is, for five seconds each.
    seconds = "wandb.sdk.lib.identity._RESOLVE_TIMEOUT_SECONDS"
    monkeypatch.setattr(seconds, 0.2, raising=False)
    wandb_server.hang()
    logger = WandbRunLogger(save_dir=private_wandb, init_timeout=0.3)
    logger.log_metrics({"x": 1.0}, step=0)
    logger.finalize("success")
    offline = [f for f in folders(private_wandb) if f.name.startswith("offline-")]
    assert f"To upload it: wandb sync {offline[0]}" in capsys.readouterr().err
    wandb_server.revive()
    sync(wandb_server, offline[0], private_wandb)
    (run,) = wandb_server.runs.values()
    assert [row["x"] for row in run.history] == [1.0]


# ---- `trainkit train`: on the disk, on a server, under an agent ----------------------


def test_without_an_account_the_run_is_offline_and_can_be_uploaded(
    private_wandb: Path, wandb_server: WandbServer
) -> None:
    words = ["logger=wandb", "lr_scaling=linear", "lr_scaling.reference_batch=4"]
    assert training.train(*words) == 0
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
    words = ["logger=wandb", "model._target_=tests.cli.training.Breaks"]
    assert training.train(*words) == 1
    run = only_run(online)
    assert run.state == "failed"
    assert len(window_losses(run.history)) == 1
    monkeypatch.setattr(training.Breaks, "at", -1)
    assert training.train(*words) == 0
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
    command = [sys.executable, "-m", "wandb"]
    assert ended([*command, "sweep", "sweep.yaml"], private_wandb, env).returncode == 0
    agent = ended([*command, "agent", "local/p/sw0"], private_wandb, env)
    assert agent.returncode == 0, agent.stderr
    runs = {
        run.config.get("trainer.max_steps"): run for run in wandb_server.runs.values()
    }
    stopped, whole = runs[steps[0]], runs[steps[2]]
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
