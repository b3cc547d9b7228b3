"""recipes/loops: loops without Lightning's Trainer, each run as its file says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.startup import forked

LOOPS = Path(__file__).parents[2] / "recipes" / "loops"
EXACT = re.compile(r"^(.*): (\S+) from the big batch$", re.M)
PLAIN = re.compile(r"(\d+)%")


def test_each_loop_is_tried() -> None:
    assert {path.name for path in LOOPS.glob("*.py")} == {name for name, *_ in LINES}


LINES = [
    ("plain.py", 3, 3),
    ("with_fabric.py", 1, 0),
    ("hf_trainer.py", 1, 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_exact", "num_plain"), LINES)
def test_it_is_the_big_batch(
    name: str, num_exact: int, num_plain: int, tmp_path: Path
) -> None:
    """In float64; what it prints beside it, plain accumulation, is the control."""
    done = subprocess.run(
        [sys.executable, str(LOOPS / name)],
        cwd=tmp_path,
        env={**os.environ, **forked()},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    exact = [float(off) for _, off in EXACT.findall(done.stdout) if "%" not in off]
    plain = [int(off) for off in PLAIN.findall(done.stdout)]
    assert len(exact) == num_exact
    assert max(exact) < 1e-12
    assert len(plain) == num_plain
    assert all(off > 2 for off in plain)
