"""The command in a process of its own: what it loads, says and ends with."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.startup import CHILD_PATH
from trainkit import __version__

PLAN = ["plan", "--target", "512", "--world-size", "4", "--max-micro-batch", "24"]
HEAVY = {"torch", "lightning", "pytorch_lightning", "wandb", "torchmetrics"}


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in another folder, with no setting of the user's."""
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), "LANG": "C.UTF-8"}
    env["PYTHONPATH"] = CHILD_PATH
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.parametrize(
    ("argv", "said", "may_load"),
    [
        (["--help"], "usage: trainkit COMMAND", set()),
        (["--version"], f"trainkit {__version__}", set()),
        (PLAN, "accumulation: 8 micro-batches", set()),
        ([*PLAN, "--json"], '"accumulate": 8', set()),
        (["plan", "--help"], "keys of --json", set()),
        (["completion", "bash"], "-F _python_argcomplete trainkit", set()),
        (["completion", "--query", "trainkit plan --t"], "--target", set()),
        (["train", "--cfg", "job"], "accumulate_grad_batches:", {"hydra", "omegaconf"}),
    ],
)
def test_what_only_answers_loads_nothing_heavy(
    argv: list[str], said: str, may_load: set[str], tmp_path: Path
) -> None:
    program = f"""
import sys
from trainkit.cli.main import main
try:
    status = main({argv!r})
except SystemExit as done:
    status = done.code or 0
print("ended:", status, *sorted({HEAVY | {"hydra", "omegaconf"}!r} & set(sys.modules)))
"""
    done = python(tmp_path, "-c", program)
    assert done.stderr == ""
    text, _, ended = done.stdout.rpartition("ended:")
    assert said in text
    status, *loaded = ended.split()
    assert status == "0"
    assert set(loaded) <= may_load
    assert list(tmp_path.iterdir()) == []  # and leaves nothing behind


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["plna"], "command: must be one of new, train, .* Did you mean plan"),
        ([*PLAN, "--rule", "auto"], "invalid choice: 'auto' .*linear"),
        (["plan", "--target", "0", "--max-micro-batch", "8"], "BatchPlan target: must"),
        (["completion", "tcsh"], "invalid choice: 'tcsh' .*bash"),
        (["train", "accumulation=nothing"], "'accumulation'(?s:.*)per_sample"),
    ],
)
def test_a_mistake_is_one_message_with_the_choices_and_2(
    argv: list[str], message: str, tmp_path: Path
) -> None:
    done = python(tmp_path, "-m", "trainkit", *argv)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.match(f"trainkit: (?s:.*){message}", done.stderr)
    assert "Traceback" not in done.stderr
