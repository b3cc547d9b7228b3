"""A run that was interrupted ends as one that was not, and two ranks end as one."""

from __future__ import annotations

import csv
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cli.sweep.helpers import private_env
from tests.cli.training import (
    SMALL,
    killer,
    run_dirs,
    same_weights,
    summary_of,
    the_run,
    train,
    weights_of,
)
from tests.startup import ended, forked

RUN = [
    *[word for word in SMALL if "max_steps" not in word],
    "trainer.max_epochs=2",  # of 5 windows, across saves; the schedule must count them
    "trainer.max_steps=-1",
    "trainer.accumulate_grad_batches=3",
    "trainer.val_check_interval=4",
    "callbacks.checkpoint.every_n_train_steps=2",
    "data.num_train=26",
    "model.dropout=0.2",
]


def run_apart(where: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which can be killed."""
    environ = {**os.environ, "TRAINKIT_ALLOW": "tests", **forked()}
    return ended([sys.executable, "-m", "trainkit", "train", *words], where, environ)


def pasted(line: str) -> None:
    """In another folder, and where the command is not on the PATH."""
    environ = {"PATH": "/usr/bin:/bin", "TRAINKIT_ALLOW": "tests"}
    environ["HOME"] = os.environ.get("HOME", "/")
    environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())  # sums are split by them
    subprocess.run(line, shell=True, cwd="/", env=environ, check=True, timeout=240)


def run_here(where: Path, *words: str, status: int = 0) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(where)
        patch.setattr(sys, "argv", ["trainkit"])
        patch.setenv("TRAINKIT_ALLOW", "tests")
        assert train(*words, small=[]) == status
    return the_run(where)


def rows_of(run: Path) -> list[str]:
    return (run / "metrics.csv").read_text().splitlines()


def furthest(one: Path, other: Path) -> float:
    """The largest difference between any two weights at the end."""
    theirs = weights_of(other)
    gaps = [(w - theirs[name]).abs().max() for name, w in weights_of(one).items()]
    return float(torch.stack(gaps).max())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_here(tmp_path_factory.mktemp("whole"), *RUN)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "batch", "signum", "status"),
    [
        ("on_validation_batch_start", 8, "SIGTERM", 143),
        ("on_train_batch_start", 13, "SIGUSR2", 140),
        ("on_save_checkpoint", 11, "SIGKILL", -9),
    ],
)
def test_it_ends_as_if_nothing_had_happened(
    hook: str, batch: int, signum: str, status: int, whole: Path, tmp_path: Path
) -> None:
    killed = run_apart(tmp_path, *RUN, killer(hook, batch, signum))
    assert killed.returncode == status, killed.stderr
    run = the_run(tmp_path)
    last = run / "checkpoints" / "last.ckpt"
    resumed, saved = f"ckpt_path={last}", last.read_bytes()
    run_here(tmp_path, *RUN, f"paths.run_dir={run}", status=2)  # it is not replaced
    assert last.read_bytes() == saved
    line = killed.stdout.partition("to resume: ")[2].rstrip("\n")
    if status > 0:
        assert summary_of(run)["status"] == "interrupted"
        assert line.endswith(f" train {resumed}")
    if signum == "SIGTERM":
        pasted(f"{line} callbacks.killer=null")
    else:
        run_here(tmp_path, resumed, "callbacks.killer=null")
    assert the_run(tmp_path) == run
    assert same_weights(weights_of(run), weights_of(whole))
    assert rows_of(run) == rows_of(whole)
    ended, expected = (
        torch.load(each / "checkpoints" / "last.ckpt", weights_only=False)
        for each in (run, whole)
    )
    assert ended["lr_schedulers"] == expected["lr_schedulers"]
    assert summary_of(run)["windows"] == summary_of(whole)["windows"]


@pytest.mark.slow
def test_another_seed_is_another_run(whole: Path, tmp_path: Path) -> None:
    """The control: dropout and the order of the data matter."""
    run = run_here(tmp_path, *RUN, "seed=1")
    assert not same_weights(weights_of(run), weights_of(whole))
    assert rows_of(run) != rows_of(whole)


# 3 optimizer steps an epoch, the last of one batch; a rate that does not depend on how
# long training is.
LONGER = [
    *[word for word in SMALL if "max_steps" not in word],
    "data.num_train=14",
    "trainer.accumulate_grad_batches=3",
    "trainer.val_check_interval=7",
    "callbacks.checkpoint.every_n_train_steps=3",  # never at a stop within an epoch
    "scheduler=none",
]
STEPS = "trainer.max_steps="
COPIED = pytest.mark.filterwarnings("ignore:The dirpath has changed")


@pytest.fixture(scope="module")
def epoch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("epoch")
    run_here(where, *LONGER, f"{STEPS}-1", "trainer.max_epochs=1")
    return where


@pytest.fixture
def an_epoch(tmp_path: Path, epoch: Path) -> Path:
    """A copy of a run that has finished its one epoch."""
    shutil.copytree(epoch, tmp_path, dirs_exist_ok=True)
    return the_run(tmp_path)


@COPIED
def test_it_ends_as_one_long_run(
    an_epoch: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It stops at the end of an epoch, within one, and at the end of all."""
    whole = run_here(tmp_path_factory.mktemp("whole"), *LONGER, f"{STEPS}9")
    last = f"ckpt_path={an_epoch / 'checkpoints' / 'last.ckpt'}"
    run_here(tmp_path, last, f"{STEPS}5", "trainer.max_epochs=null")
    run_here(tmp_path, last, f"{STEPS}-1", "trainer.max_epochs=3")
    assert same_weights(weights_of(an_epoch), weights_of(whole))
    assert rows_of(an_epoch) == rows_of(whole)


@COPIED
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.usefixtures("an_epoch")
def test_a_metric_is_not_looked_for_where_nothing_is_left_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nope = ["ckpt_path=last", "metric=nope", "callbacks.best=null"]
    run_here(tmp_path, *nope)
    assert "nope" not in capsys.readouterr().out
    run_here(tmp_path, *nope, "trainer.max_epochs=2", status=2)
    assert "metric: nope is logged by nothing" in capsys.readouterr().err


# ---- two ranks, which Lightning starts with our own command line ---------------------


SCRIPT = [str(Path(sys.executable).with_name("trainkit"))]
MODULE = [sys.executable, "-m", "trainkit"]
ONE_RANK = "trainer.accumulate_grad_batches=4"
HALF = "trainer.accumulate_grad_batches=2"
TWO_RANKS = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", HALF]
TWO_NODES = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=1", HALF]
TWO_NODES += ["trainer.num_nodes=2", "ckpt_path=auto"]
FOUR_STEPS = "trainer.max_steps=4"
SGD = ["optimizer=sgd", "optimizer.lr=0.1"]
"""AdamW divides by the gradient's own size, and would show rounding enlarged."""


ALONE = {"OMP_NUM_THREADS": "1", "TRAINKIT_ALLOW": "tests"}


def run(
    program: list[str], *words: str, cwd: Path, **more: str
) -> subprocess.CompletedProcess[str]:
    env = private_env(cwd) | ALONE | more
    return ended([*program, "train", *SMALL, *TWO_RANKS, *words], cwd, env)


def steps_logged(run_dir: Path) -> list[str]:
    """Those of the windows, which are one row each."""
    with (run_dir / "metrics.csv").open() as file:
        return [row["step"] for row in csv.DictReader(file) if row["window/loss"]]


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The run of each strategy."""
    runs = {}
    for name in ("per_token", "uniform"):
        words = [*SGD, ONE_RANK, FOUR_STEPS, f"accumulation={name}"]
        runs[name] = run_here(tmp_path_factory.mktemp(name), *SMALL, *words)
    return runs


@pytest.mark.slow
def test_two_ranks_train_as_one_also_one_job_after_the_other(
    on_one_rank: dict[str, Path], tmp_path: Path
) -> None:
    """Two loader batches of one rank are one of each of two: `ResumableLoader` deals
    rows out so that a window of 4 x 2 rows holds the same ones on any number of ranks.
    """
    job = ["seed=0,1", "hydra.sweep.dir=two", *SGD, FOUR_STEPS]
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


MODELS = "tests.cli.training"
SIGNALLED = f"model._target_={MODELS}.Signalled"


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_both_and_the_run_goes_on_from_there(
    on_one_rank: dict[str, Path], tmp_path: Path
) -> None:
    asks = {"TEST_SIGNAL": "SIGTERM", "TEST_RANKS": "0"}
    stopped = run(MODULE, SIGNALLED, *SGD, FOUR_STEPS, cwd=tmp_path, **asks)
    assert stopped.returncode == 143, stopped.stderr
    two = the_run(tmp_path)
    assert summary_of(two)["status"] == "interrupted"
    assert 1 <= summary_of(two)["steps"] < 4
    assert f"stopped by SIGTERM; to resume: cd {tmp_path} && " in stopped.stdout
    assert stopped.stdout.count("trainkit | stopped by") == 1
    done = run(MODULE, "ckpt_path=last", SIGNALLED, FOUR_STEPS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert the_run(tmp_path) == two
    one = on_one_rank["per_token"]
    assert furthest(two, one) < 1e-6
    assert steps_logged(two) == steps_logged(one) == list("1234")


@pytest.mark.slow
def test_a_rank_that_fails_fails_the_training(tmp_path: Path) -> None:
    done = run(SCRIPT, f"model._target_={MODELS}.SecondRankFails", cwd=tmp_path)
    # Lightning kills a rank that has not ended some seconds after it was told to.
    assert done.returncode in (1, -signal.SIGKILL), done.stderr
    assert "RuntimeError: the second rank is broken" in done.stderr
    if done.returncode == 1:
        assert summary_of(the_run(tmp_path))["status"] == "failed"


@pytest.mark.slow
def test_a_launchers_worker_starts_ranks_too(tmp_path: Path) -> None:
    """There the command line is the worker's own."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    job = ["seed=0", "hydra.sweep.dir=two", "hydra/launcher=joblib"]
    done = run(SCRIPT, "-m", *job, "hydra.launcher.n_jobs=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = summary_of(the_run(tmp_path / "two"))
    assert summary["effective_batch"]["replicas"] == 2


def node(where: Path, port: int, *words: str) -> subprocess.Popen[str]:
    """Each node is given the same command, and its own number of restarts counts."""
    env = private_env(where) | ALONE | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
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


@pytest.mark.slow
def test_a_node_killed_and_started_again_trains_as_one_process(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Killed in its second window; the first step's checkpoint is gone on from, in the
    same folder, though only one of the nodes has counted a failure."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    killed = f"model._target_={MODELS}.KilledOnce"
    nodes = [node(tmp_path, port, killed, *SGD) for _ in range(2)]
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
    one = run_here(tmp_path_factory.mktemp("one"), *SMALL, *SGD, ONE_RANK)
    half = run_here(tmp_path_factory.mktemp("half"), *SMALL, *SGD, HALF)
    assert furthest(two, one) < 1e-6
    assert furthest(two, half) > 1e-4  # the control
    assert steps_logged(two) == steps_logged(one) == list("12")
