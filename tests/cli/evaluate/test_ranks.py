"""A run on two ranks: its test at the end, and evaluations on one device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.evaluate.runs import EPOCHS, OWN, result, trainkit
from tests.cli.training import summary_of, the_run
from tests.startup import forked

pytestmark = pytest.mark.slow

TWO_RANKS = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]


def test_each_row_counts_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nine rows to test are ten on two ranks, and nine on one device."""
    own = [f"model._target_={OWN}.Net", f"data._target_={OWN}.Data", "test=true"]
    done = subprocess.run(
        [sys.executable, "-m", "trainkit", "train", *own, *EPOCHS, *TWO_RANKS],
        cwd=tmp_path,
        env=dict(os.environ, TRAINKIT_ALLOW="tests", **forked()),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "; on 2 ranks some rows may count twice" in done.stdout
    run = the_run(tmp_path)
    at_end = summary_of(run)["test"]
    assert at_end == result(run, "test")
    assert trainkit("test", run) == 0
    assert "the run had trainer.devices=2" in capsys.readouterr().out
    once = result(run, "test")
    assert once["step"] == at_end["step"]
    assert once["metrics"] != at_end["metrics"]  # of nine rows, one counted twice
    assert trainkit("test", run, "trainer=cpu") == 0
    assert result(run, "test")["metrics"] == once["metrics"]
