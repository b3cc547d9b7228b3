"""A run that was interrupted, or goes on for longer, ends as one that was not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cli.training import (
    SMALL,
    same_weights,
    summary_of,
    the_run,
    train,
    weights_of,
)
from tests.startup import forked

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
    return subprocess.run(
        [sys.executable, "-m", "trainkit", "train", *words],
        cwd=where,
        env=environ,
        capture_output=True,
        text=True,
        timeout=240,
    )


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


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_here(tmp_path_factory.mktemp("whole"), *RUN)


CASES = [
    ("on_validation_batch_start", 8, "SIGTERM", 143),
    ("on_train_batch_start", 13, "SIGUSR2", 140),
    ("on_save_checkpoint", 11, "SIGKILL", -9),
]


@pytest.mark.slow
@pytest.mark.parametrize(("hook", "batch", "signum", "status"), CASES)
def test_it_ends_as_if_nothing_had_happened(
    hook: str, batch: int, signum: str, status: int, whole: Path, tmp_path: Path
) -> None:
    killer = (
        "+callbacks.killer={_target_: tests.cli.train.killer.Killer, "
        f"hook: {hook}, batch: {batch}, signum: {signum}}}"
    )
    killed = run_apart(tmp_path, *RUN, killer)
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


@pytest.fixture
def an_epoch(tmp_path: Path, epoch: Path) -> Path:
    """The folder of a copy of a run that has finished its one epoch."""
    shutil.copytree(epoch, tmp_path, dirs_exist_ok=True)
    return the_run(tmp_path)


@pytest.fixture(scope="module")
def epoch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("epoch")
    run_here(where, *LONGER, f"{STEPS}-1", "trainer.max_epochs=1")
    return where


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
