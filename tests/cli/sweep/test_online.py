"""`trainkit sweep`, and W&B's own commands: what the server received counts."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.sweep.helpers import LR, command, private_env, run, toy
from tests.startup import forked
from tests.wandb_server import Run, WandbServer, wait_until

TWO = {"values": [0.1, 0.01]}


@pytest.fixture
def env(wandb_server: WandbServer, tmp_path: Path) -> dict[str, str]:
    return wandb_server.env(tmp_path, **forked())


def by_lr(server: WandbServer) -> dict[float, Run]:
    return {received.config["lr"]: received for received in server.runs.values()}


def steps(received: Run) -> list[int]:
    return [row["step"] for row in received.history]


@pytest.mark.slow
def test_two_agents_run_a_sweep_over_a_crash(
    wandb_server: WandbServer, env: dict[str, str], tmp_path: Path
) -> None:
    toy(tmp_path, {"lr": LR, "rows": 4, "crash_at": 0.1})
    done = run(command("toy.yaml", "--agents", "2"), env, tmp_path)
    assert done.returncode == 0, done.stderr
    runs = by_lr(wandb_server)
    whole = ("finished", [1, 2, 3, 4])
    found = {lr: (r.state, steps(r)) for lr, r in runs.items()}
    assert found == {0.1: ("failed", [1, 2]), 0.01: whole, 0.001: whole}
    assert len(wandb_server.agents) == 2
    assert all(agent.runs for agent in wandb_server.agents.values())
    assert not wandb_server.unknown


@pytest.mark.slow
def test_the_clients_own_commands_run_the_file_and_hyperband_ends_a_trial_gracefully(
    wandb_server: WandbServer, env: dict[str, str], tmp_path: Path
) -> None:
    rule = {"type": "hyperband", "min_iter": 2}
    hold = {"hold": "never", "hold_at": 0.1}
    path = toy(tmp_path, {"lr": TWO, "rows": 4, **hold}, early_terminate=rule)
    wandb_server.should_stop = lambda r: (
        r.config.get("lr") == 0.1 and len(r.history) >= 2
    )
    wandb = [sys.executable, "-m", "wandb"]
    assert run([*wandb, "sweep", str(path)], env, tmp_path).returncode == 0
    agent = run([*wandb, "agent", "local/p/sw0"], env, tmp_path)
    assert agent.returncode == 0, agent.stderr
    runs = by_lr(wandb_server)
    found = {lr: (r.exit_code, steps(r)) for lr, r in runs.items()}
    assert found == {0.1: (0, [1, 2]), 0.01: (0, [1, 2, 3, 4])}
    assert wandb_server.sweeps["sw0"].config["early_terminate"] == rule


@pytest.mark.slow
def test_ctrl_c_stops_the_agents_and_their_trials_save(
    wandb_server: WandbServer, env: dict[str, str], tmp_path: Path
) -> None:
    toy(tmp_path, {"lr": TWO, "rows": 4, "hold": "never"})
    process = subprocess.Popen(
        command("toy.yaml"),
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: any(len(r.history) == 2 for r in wandb_server.runs.values()))
        process.send_signal(signal.SIGINT)
        _, news = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "to resume: cd " in news
    assert " sweep toy.yaml --resume sw0" in news
    (received,) = wandb_server.runs.values()
    assert (received.exit_code, steps(received)) == (0, [1, 2])
    (tmp_path / "never").touch()
    done = run(command("toy.yaml", "--resume", "sw0"), env, tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(wandb_server.sweeps) == 1
    assert len(wandb_server.runs) == 2


@pytest.mark.slow
def test_a_resumed_trial_gets_arguments_that_hydra_takes(
    wandb_server: WandbServer, env: dict[str, str], tmp_path: Path
) -> None:
    # https://github.com/wandb/wandb/issues/9143: the agent is given all that was logged
    logged: dict[str, Any] = {
        "optimizer.lr": 0.01,
        "trainkit": {"optimizer": {"_target_": "torch.optim.AdamW", "lr": 0.01}},
        "schedule": None,
    }
    wandb_server.suggest = lambda sweep, n: logged if n == 0 else None
    program = tmp_path / "echo.py"
    program.write_text(
        "import json, sys\n"
        "from trainkit.cli.sweep.whole_config import for_train\n"
        "json.dump([sys.argv[1:], for_train(sys.argv[1:])], open('words', 'w'))\n"
    )
    words = ["${interpreter}", "${program}", "logger=csv", "${args_no_hyphens}"]
    toy(tmp_path, {"optimizer.lr": LR}, program=str(program), command=words)
    done = run(command("toy.yaml"), env, tmp_path)
    assert done.returncode == 0, done.stderr
    given, kept = json.loads((tmp_path / "words").read_text())
    assert "schedule=None" in given
    assert any(word.startswith("trainkit={'optimizer'") for word in given)
    assert kept == ["logger=csv", "optimizer.lr=0.01", "schedule=null"]


def test_without_a_login_the_message_says_what_to_do(tmp_path: Path) -> None:
    toy(tmp_path, {"lr": LR})
    env = private_env(tmp_path)
    done = run(command("toy.yaml"), {**env, "NETRC": str(tmp_path / "none")}, tmp_path)
    assert done.returncode == 2
    assert "wandb login" in done.stderr
    assert "--offline" in done.stderr
    assert "Traceback" not in done.stderr
