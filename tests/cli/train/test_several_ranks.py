"""`trainkit train` on two ranks, which Lightning starts with our own command line."""

from __future__ import annotations

import csv
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cli.training import SMALL, run_dirs, summary_of, the_run, train, weights_of
from tests.startup import forked

pytestmark = pytest.mark.slow

SCRIPT = [str(Path(sys.executable).with_name("trainkit"))]
MODULE = [sys.executable, "-m", "trainkit"]
ONE_RANK = ["trainer.accumulate_grad_batches=4"]
TWO_RANKS = [
    "trainer=ddp",
    "trainer.accelerator=cpu",
    "trainer.devices=2",
    "trainer.accumulate_grad_batches=2",
]
STEPS = "trainer.max_steps=4"
SGD = ["optimizer=sgd", "optimizer.lr=0.1"]
"""AdamW divides by the gradient's own size, and would show rounding enlarged."""


def run(
    program: list[str], *words: str, cwd: Path, **more: str
) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    env |= {"HOME": str(cwd), "OMP_NUM_THREADS": "1", **forked()}
    env |= {"TRAINKIT_ALLOW": "tests", **more}
    return subprocess.run(
        [*program, "train", *SMALL, *TWO_RANKS, *words],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def furthest(one: Path, other: Path) -> float:
    """The largest difference between any two weights at the end."""
    theirs = weights_of(other)
    gaps = [(w - theirs[name]).abs().max() for name, w in weights_of(one).items()]
    return float(torch.stack(gaps).max())


def steps_logged(run_dir: Path) -> list[str]:
    """Those of the windows, which are one row each."""
    with (run_dir / "metrics.csv").open() as file:
        return [row["step"] for row in csv.DictReader(file) if row["window/loss"]]


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The run of each strategy."""
    where = tmp_path_factory.mktemp("one_rank")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(where)
        patch.setattr(sys, "argv", ["trainkit"])
        for name in ("per_token", "uniform"):
            words = [STEPS, f"accumulation={name}", f"name={name}"]
            assert train(*SGD, *ONE_RANK, *words) == 0
    return {run.parent.name: run for run in run_dirs(where)}


def test_two_ranks_train_as_one_also_one_job_after_the_other(
    on_one_rank: dict[str, Path], tmp_path: Path
) -> None:
    """Two loader batches of one rank are one of each of two: `ResumableLoader` deals
    rows out so that a window of 4 x 2 rows holds the same ones on any number of ranks.
    """
    job = ["seed=0,1", "hydra.sweep.dir=two", *SGD, STEPS]
    done = run(SCRIPT, "-m", *job, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trainkit | training: finished after 4") == 2
    first, second = run_dirs(tmp_path / "two")
    one = on_one_rank["per_token"]
    assert furthest(first, one) < 1e-6
    assert furthest(second, one) > 1e-3  # the controls: another seed, another weight
    assert furthest(first, on_one_rank["uniform"]) > 1e-4
    for found in (first, second):
        assert steps_logged(found) == ["1", "2", "3", "4"]
        log = (found / "train.log").read_text()
        assert log.count("trainkit | step: ") == log.count("training: finished") == 1
        summary = summary_of(found)
        assert summary["run_dir"] == str(found)
        assert summary["effective_batch"]["replicas"] == 2
        assert summary["effective_batch"]["size"] == 8


SIGNALLED = "model._target_=tests.cli.train.rank_models.Signalled"


def test_a_signal_to_one_rank_stops_both_and_the_run_goes_on_from_there(
    on_one_rank: dict[str, Path], tmp_path: Path
) -> None:
    asks = {"TEST_SIGNAL": "SIGTERM", "TEST_RANKS": "0"}
    stopped = run(MODULE, SIGNALLED, *SGD, STEPS, cwd=tmp_path, **asks)
    assert stopped.returncode == 143, stopped.stderr
    two = the_run(tmp_path)
    assert summary_of(two)["status"] == "interrupted"
    assert 1 <= summary_of(two)["steps"] < 4
    assert f"stopped by SIGTERM; to resume: cd {tmp_path} && " in stopped.stdout
    assert stopped.stdout.count("trainkit | stopped by") == 1

    done = run(MODULE, "ckpt_path=last", SIGNALLED, STEPS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert the_run(tmp_path) == two
    one = on_one_rank["per_token"]
    assert furthest(two, one) < 1e-6
    assert steps_logged(two) == steps_logged(one) == list("1234")


def test_a_rank_that_fails_fails_the_training(tmp_path: Path) -> None:
    model = "model._target_=tests.cli.train.rank_models.SecondRankFails"
    done = run(SCRIPT, model, cwd=tmp_path)

    # Lightning kills a rank that has not ended some seconds after it was told to.
    assert done.returncode in (1, -signal.SIGKILL), done.stderr
    assert "RuntimeError: the second rank is broken" in done.stderr
    if done.returncode == 1:
        assert summary_of(the_run(tmp_path))["status"] == "failed"


def test_a_launchers_worker_starts_ranks_too(tmp_path: Path) -> None:
    """There the command line is the worker's own."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    job = ["seed=0", "hydra.sweep.dir=two", "hydra/launcher=joblib"]
    done = run(SCRIPT, "-m", *job, "hydra.launcher.n_jobs=2", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    summary = summary_of(the_run(tmp_path / "two"))
    assert summary["effective_batch"]["replicas"] == 2


KILLED = "model._target_=tests.cli.train.rank_models.KilledOnce"
TWO_NODES = [
    "trainer=ddp",
    "trainer.accelerator=cpu",
    "trainer.devices=1",
    "trainer.num_nodes=2",
    "trainer.accumulate_grad_batches=2",
    "ckpt_path=auto",
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def node(where: Path, port: int, *words: str) -> subprocess.Popen[str]:
    """Each node is given the same command, and its own number of restarts counts."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    env |= {"HOME": str(where), "OMP_NUM_THREADS": "1", **forked()}
    env |= {"TRAINKIT_ALLOW": "tests", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
    agent += ["--nproc-per-node=1", "--max-restarts=2", "--rdzv-id=job"]
    agent += ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}"]
    return subprocess.Popen(
        [*agent, "-m", "trainkit", "train", *SMALL, *TWO_NODES, *words],
        cwd=where,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_node_killed_and_started_again_trains_as_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in its second window; the first step's checkpoint is gone on from, in the
    same folder, though only one of the nodes has counted a failure."""
    port = free_port()
    nodes = [node(tmp_path, port, KILLED, *SGD) for _ in range(2)]
    try:
        said = [each.communicate(timeout=240)[0] for each in nodes]
    finally:
        for each in nodes:
            each.kill()

    assert [each.returncode for each in nodes] == [0, 0], said
    assert (tmp_path / "killed").exists()
    two = the_run(tmp_path)  # one folder
    assert two.name == "torchrun-job"
    assert summary_of(two)["effective_batch"]["replicas"] == 2
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["trainkit"])
    assert train(*SGD, "trainer.accumulate_grad_batches=4", "name=one") == 0
    assert train(*SGD, "trainer.accumulate_grad_batches=2", "name=half") == 0
    one = the_run(tmp_path / "outputs" / "one")
    assert furthest(two, one) < 1e-6
    assert furthest(two, the_run(tmp_path / "outputs" / "half")) > 1e-4  # the control
    assert steps_logged(two) == steps_logged(one) == list("12")
