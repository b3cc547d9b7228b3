"""A W&B server that dies, or is not there: training ends, and nothing is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.wandb_runs import connect, folders, sync
from tests.startup import forked
from tests.wandb_server import WandbServer
from trainkit import WandbRunLogger

TRAINING = """
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
    (tmp_path / "training.py").write_text(TRAINING)
    command = [sys.executable, "training.py", "3"]
    env = wandb_server.env(tmp_path, **forked())
    child = subprocess.Popen(
        command, env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    try:
        wandb_server.wait_until(
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
