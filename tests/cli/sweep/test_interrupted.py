"""A sweep that is killed or interrupted goes on: nothing twice, nothing lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cli.sweep import helpers
from tests.cli.sweep.helpers import LR, command, private_env, run, toy
from tests.wandb_server import WandbServer, wait_until
from trainkit.cli.sweep.offline import OfflineSweep
from trainkit.cli.sweep.process import started, wait_for_orphan
from trainkit.cli.sweep.sweep_file import SweepFile


def test_a_trial_that_still_runs_is_waited_for(tmp_path: Path) -> None:
    for folder in (tmp_path / "never made", tmp_path):  # the first is the control
        wait_for_orphan(folder, pytest.fail)
    process = started([sys.executable, "-c", "input()"], {}, tmp_path)
    process.kill()
    process.wait()
    wait_for_orphan(tmp_path, pytest.fail)
    process = started(["sleep", "600"], {}, tmp_path)
    news: list[str] = []

    def say(text: str) -> None:
        news.append(text)
        process.kill()

    wait_for_orphan(tmp_path, say)
    assert str(tmp_path) in news[0]
    assert process.wait() == -signal.SIGKILL


@pytest.fixture
def held(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A sweep in a process: its first trial has ended, its second waits."""
    parameters = {"lr": LR, "rows": 4, "started": str(tmp_path / "started")}
    hold = {"hold": str(tmp_path / "go"), "hold_at": 0.01}
    toy(tmp_path, {**parameters, **hold})
    process = subprocess.Popen(
        command("toy.yaml", "--offline"),
        cwd=tmp_path,
        env=private_env(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: len(begun(tmp_path)) == 2 or process.poll() is not None)
    wait_until(lambda: states(tmp_path) == ["finished", "running"])
    yield process
    process.kill()
    process.communicate()
    (tmp_path / "go").touch()  # whatever still waits ends


def begun(folder: Path) -> list[str]:
    path = folder / "started"
    return path.read_text().splitlines() if path.exists() else []


def number_of(held: subprocess.Popen[str]) -> int:
    """That of the sweep's process, which may be a fork that the one here waits for."""
    words = ["pgrep", "-P", str(held.pid)]
    found = subprocess.run(words, capture_output=True, text=True, check=False).stdout
    return int((found.split() or [held.pid])[0])


def states(folder: Path) -> list[str]:
    return [trial["state"] for trial in helpers.read_trials(folder / "sweeps")]


def go_on(folder: Path) -> subprocess.CompletedProcess[str]:
    (sweep,) = (folder / "sweeps").glob("*")
    words = command("toy.yaml", "--offline", "--resume", sweep.name)
    return run(words, private_env(folder), folder)


def uploaded(folder: Path, server: WandbServer) -> dict[str, list[float]]:
    """Upload everything, and what the server then has: the steps of each trial."""
    runs = [str(p) for p in folder.glob("sweeps/*/*/wandb/offline-run-*")]
    wandb = command()[:2] + ["wandb", "sync", *runs]
    done = run(wandb, server.env(folder), folder)
    assert done.returncode == 0, done.stderr
    return {
        name: [row["step"] for row in received.history]
        for name, received in server.runs.items()
    }


def test_a_killed_sweep_goes_on_with_the_trial_it_was_in(
    held: subprocess.Popen[str], tmp_path: Path, wandb_server: WandbServer
) -> None:
    os.kill(number_of(held), signal.SIGKILL)
    assert held.wait(240) == -signal.SIGKILL
    assert states(tmp_path) == ["finished", "running"]
    with ThreadPoolExecutor() as pool:
        resumed = pool.submit(go_on, tmp_path)
        with pytest.raises(TimeoutError):
            resumed.result(2)  # the trial itself is still running
        (tmp_path / "go").touch()
        done = resumed.result()
    assert done.returncode == 0, done.stderr
    assert "still runs in" in done.stderr
    assert states(tmp_path) == ["finished"] * 3
    rates = [line.split()[1] for line in begun(tmp_path)]
    assert rates == ["0.1", "0.01", "0.01", "0.001"]  # those that had ended are not
    names = [line.split()[0] for line in begun(tmp_path)]
    assert names[1] == names[2]
    (folder,) = (tmp_path / "sweeps").glob("*")
    sweep_id = folder.name
    assert uploaded(tmp_path, wandb_server) == {
        f"{sweep_id}-00{n}": [1, 2, 3, 4] for n in range(3)
    }
    received = wandb_server.runs.values()
    assert {each.group for each in received} == {sweep_id}
    assert {each.config["lr"] for each in received} == {0.1, 0.01, 0.001}
    assert {each.num_rows_received for each in received} == {4}


def test_a_sweep_is_nobody_elses_and_an_interrupted_one_says_how_to_go_on(
    held: subprocess.Popen[str], tmp_path: Path
) -> None:
    sweep = number_of(held)
    done = go_on(tmp_path)
    assert done.returncode == 2
    assert "is in use by another process" in done.stderr
    os.kill(sweep, signal.SIGTERM)
    output, news = held.communicate(timeout=240)
    assert held.returncode == 143
    assert states(tmp_path) == ["finished", "waiting"]  # the trial could save
    assert "-001; Ctrl-C again kills it" in news
    (folder,) = (tmp_path / "sweeps").glob("*")
    assert f"to resume: cd {tmp_path} && " in news
    assert f" sweep toy.yaml --offline --resume {folder.name}" in news
    assert "finished" in output  # the table of what there is
    file = tmp_path / "toy.yaml"
    before = file.read_text()
    toy(tmp_path, {"lr": {"values": [1, 2]}})
    done = go_on(tmp_path)
    assert done.returncode == 2
    assert "toy.yaml has changed since" in done.stderr
    file.write_text(before)
    (tmp_path / "go").touch()
    done = go_on(tmp_path)
    assert done.returncode == 0, done.stderr
    assert states(tmp_path) == ["finished"] * 3


@pytest.mark.parametrize("method", ["random", "bayes", "grid"])
def test_what_a_kill_left_half_done_changes_no_result(
    tmp_path: Path, method: str
) -> None:
    """A file that was being written, and a proposal that was not."""
    lr = LR if method == "grid" else {"min": 0.1, "max": 9.9}
    config = {"method": method, "metric": {"name": "x"}, "parameters": {"lr": lr}}
    sweep = SweepFile.model_validate({**config, "program": "t.py"})
    found = []
    for kills in ((), (1, 6)):  # a bayes search learns from the sixth on
        folder = tmp_path / str(kills) / "s1"
        folder.mkdir(parents=True)
        running = OfflineSweep(sweep, folder, seed="7")
        for n in range(8):
            trial = running.propose()
            if n in kills and trial is not None:
                (folder / f".{trial.name}.json.123").write_text('{"name": ')
                running = OfflineSweep(sweep, folder)
                trial = running.propose()
            if trial is not None:
                trial.metric = [trial.arguments["lr"]]
                running.save(trial, "finished")
        found.append([trial.arguments for trial in OfflineSweep(sweep, folder).trials])
    assert found[0] == found[1]
    distinct = {str(each) for each in found[0]}
    assert len(distinct) == (3 if method == "grid" else 8)  # the control
