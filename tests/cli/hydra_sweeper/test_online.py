"""`hydra/sweeper=wandb` with a server: the real client, and what it has received."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cli.sweep.helpers import run
from tests.cli.training import SMALL, run_dirs
from tests.startup import forked
from tests.wandb_server import WandbServer

GRID = ["optimizer.lr=0.001,0.01", "hydra.sweeper.method=grid"]
LONG = ["trainer.max_steps=2000", "trainer.val_check_interval=2"]
IN_BACKGROUND = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]


def command(*words: str) -> list[str]:
    program = [sys.executable, "-m", "trainkit", "train", "-m", "hydra/sweeper=wandb"]
    return [*program, *SMALL, *words]


def env_of(server: WandbServer, home: Path) -> dict[str, str]:
    env = server.env(home, **forked())
    del env["WANDB_DIR"]
    return env


def rate_of(folder: Path) -> float:
    return yaml.safe_load((folder / "config.yaml").read_text())["optimizer"]["lr"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["basic", "joblib"])
def test_each_trial_is_a_run_of_the_sweep_and_a_job_of_hydras_launcher(
    wandb_server: WandbServer, tmp_path: Path, launcher: str
) -> None:
    at_once = ["hydra.sweeper.n_jobs=2", "hydra.launcher.n_jobs=2"]
    more = at_once if launcher == "joblib" else []
    if more:
        pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    words = [*GRID, f"hydra/launcher={launcher}", *more, "hydra.sweeper.name=mine"]

    done = run(command(*words), env_of(wandb_server, tmp_path), tmp_path)

    assert done.returncode == 0, done.stderr
    (sweep,) = wandb_server.sweeps.values()
    assert sweep.config["name"] == "mine"
    assert sweep.config["metric"] == {"name": "val/loss", "goal": "minimize"}
    assert len(wandb_server.agents) == max(1, len(more))
    received = wandb_server.runs.values()
    assert {r.config["optimizer.lr"]: (r.sweep, r.state) for r in received} == {
        0.001: ("sw0", "finished"),
        0.01: ("sw0", "finished"),
    }
    losses = {r.config["optimizer.lr"]: r.summary["val/loss"] for r in received}
    assert {rate_of(folder) for folder in run_dirs(tmp_path)} == set(losses)
    (results,) = tmp_path.rglob("optimization_results.yaml")
    best = yaml.safe_load(results.read_text())
    assert best["best_value"] == pytest.approx(min(losses.values()))
    assert losses[best["best_params"]["optimizer.lr"]] == min(losses.values())
    assert "logger=several is added" in done.stdout
    assert "wandb agent local/p/sw0" in done.stdout
    assert "Exception" not in done.stderr
    assert not wandb_server.unknown


@pytest.mark.slow
def test_a_trial_that_the_server_stops_is_a_result_and_the_next_one_starts(
    wandb_server: WandbServer, tmp_path: Path
) -> None:
    rule = "hydra.sweeper.early_terminate={type:hyperband,min_iter:2}"
    wandb_server.should_stop = lambda r: r.name == "sw0r0" and len(r.history) >= 1
    long = [*LONG, "callbacks.checkpoint.every_n_train_steps=500", "~callbacks.best"]
    env = env_of(wandb_server, tmp_path)
    process = subprocess.Popen(
        command(*GRID, rule, *long),
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wandb_server.wait_until(lambda: "sw0r1" in wandb_server.runs)
        first = wandb_server.runs["sw0r0"]
        wandb_server.wait_until(lambda: first.exit_code is not None)
        assert first.exit_code == 0
        second = wandb_server.runs["sw0r1"]
        wandb_server.wait_until(lambda: len(second.history) >= 1)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=240)
    finally:
        process.kill()

    # The control: a SIGTERM that the server has not asked for ends the sweep.
    assert process.returncode == 143, out
    assert "run 0, sw0r0 stopped: optimizer.lr=0.001" in out
    assert "run 1" not in out
    assert len(run_dirs(tmp_path)) == 2


@pytest.mark.parametrize(
    ("before", "signum"),
    [
        pytest.param([], signal.SIGINT, id="ctrl_c"),
        # What a script starts with `&`, and so an agent, does not hear SIGINT.
        pytest.param(IN_BACKGROUND, signal.SIGTERM, id="kill_in_background"),
    ],
)
def test_after_a_signal_another_agent_can_continue_the_sweep(
    wandb_server: WandbServer, tmp_path: Path, before: list[str], signum: int
) -> None:
    env = env_of(wandb_server, tmp_path)
    process = subprocess.Popen(
        [*before, *command(*GRID, *LONG)],
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wandb_server.wait_until(
            lambda: any(r.history for r in wandb_server.runs.values())
        )
        process.send_signal(signum)
        out, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 128 + signum, out
    assert set(wandb_server.runs) == {"sw0r0"}

    agent = [sys.executable, "-m", "wandb", "agent", "--count=1", "local/p/sw0"]
    process = subprocess.Popen(agent, cwd=tmp_path, env=env)
    try:
        wandb_server.wait_until(lambda: "sw0r1" in wandb_server.runs)
        second = wandb_server.runs["sw0r1"]
        wandb_server.wait_until(lambda: bool(second.history))
        assert second.config["optimizer.lr"] == 0.01
        wandb_server.stop_run("sw0r1")
        process.wait(timeout=240)
    finally:
        process.kill()
    assert second.exit_code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["logger=none"], "logger=none logs nothing there. Write logger=wandb"),
        (
            [
                "hydra/launcher=joblib",
                "hydra.sweeper.early_terminate={type:hyperband,min_iter:2}",
            ],
            "received JoblibLauncher and n_jobs=1",
        ),
        (
            [
                "hydra.sweeper.n_jobs=2",
                "hydra.sweeper.early_terminate={type:hyperband,min_iter:2}",
            ],
            "received BasicLauncher and n_jobs=2",
        ),
        (["optimizer.lrr=1,2"], "Did you mean optimizer.lr"),
    ],
)
def test_a_mistake_creates_no_sweep(
    wandb_server: WandbServer, tmp_path: Path, words: list[str], message: str
) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    env = env_of(wandb_server, tmp_path)
    done = run(command(*GRID, *words), env, tmp_path)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not wandb_server.sweeps
    assert not (tmp_path / "outputs").exists()


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_told_and_the_engine_takes_over(
    wandb_server: WandbServer, tmp_path: Path
) -> None:
    pytest.importorskip("sweeps")
    wandb_server.die()
    done = run(command(*GRID), env_of(wandb_server, tmp_path), tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{wandb_server.base_url} does not answer" in done.stdout
    assert len(run_dirs(tmp_path)) == 2
