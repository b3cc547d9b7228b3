"""The same on Hydra 1.4, which asks for lists of what a configuration may name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ["hydra-core==1.4.0rc3", "omegaconf==2.4.1rc1"]
TESTS = [
    "tests/config/test_conf.py::test_a_strategy_reaches_a_module_of_either_kind",
    "tests/config/test_targets.py",
    "tests/cli/train/test_mistakes.py::test_places_with_odd_names",
    "tests/cli/train/test_mistakes.py::test_a_refusal_is_not_said_twice",
]
OF_OTHERS = "ignore:register_new_resolver"  # a launcher calls it by its old name


@pytest.mark.environments
@pytest.mark.timeout(600)
def test_configurations_work_without_a_warning(tmp_path: Path) -> None:
    """Beside the installed one, so that nothing is changed by the test."""
    if "PYTHONPATH" in os.environ:
        pytest.skip("it is what runs now, or something else is wanted")
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--target"]
    got = subprocess.run(
        [*install, str(tmp_path), *PACKAGES], capture_output=True, timeout=240
    )
    if got.returncode != 0:
        pytest.skip("needs a package index")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        + ["-W", OF_OTHERS, *TESTS],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-4000:]
