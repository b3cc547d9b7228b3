"""A run of `trainkit train` that was interrupted ends as one that was not."""

from __future__ import annotations

import os
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

pytestmark = pytest.mark.slow

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


def run_here(where: Path, *words: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(where)
        patch.setattr(sys, "argv", ["trainkit"])
        patch.setenv("TRAINKIT_ALLOW", "tests")
        return train(*words, small=[])


def rows_of(run: Path) -> list[str]:
    return (run / "metrics.csv").read_text().splitlines()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("whole")
    assert run_here(where, *RUN) == 0
    return the_run(where)


CASES = [
    ("on_validation_batch_start", 8, "SIGTERM", 143),
    ("on_train_batch_start", 13, "SIGUSR2", 140),
    ("on_save_checkpoint", 11, "SIGKILL", -9),
]


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
    resumed = f"ckpt_path={run / 'checkpoints' / 'last.ckpt'}"
    line = killed.stdout.partition("to resume: ")[2].rstrip("\n")
    if status > 0:
        assert summary_of(run)["status"] == "interrupted"
        assert line.endswith(f" train {resumed}")
    if signum == "SIGTERM":
        pasted(f"{line} callbacks.killer=null")
    else:
        assert run_here(tmp_path, resumed, "callbacks.killer=null") == 0
    assert the_run(tmp_path) == run
    assert same_weights(weights_of(run), weights_of(whole))
    assert rows_of(run) == rows_of(whole)
    ended, expected = (
        torch.load(each / "checkpoints" / "last.ckpt", weights_only=False)
        for each in (run, whole)
    )
    assert ended["lr_schedulers"] == expected["lr_schedulers"]
    assert summary_of(run)["windows"] == summary_of(whole)["windows"]


def test_another_seed_is_another_run(whole: Path, tmp_path: Path) -> None:
    """The control: dropout and the order of the data matter."""
    assert run_here(tmp_path, *RUN, "seed=1") == 0
    assert not same_weights(weights_of(the_run(tmp_path)), weights_of(whole))
    assert rows_of(the_run(tmp_path)) != rows_of(whole)
