"""A folder that a process writes to is not another's."""

from __future__ import annotations

import errno
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from trainkit.cli.runs.folder import only_one
from trainkit.errors import TrainkitError

TRIES = """
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from trainkit.cli.runs.folder import only_one
with only_one(Path(sys.argv[1]), what="run"):
    pass
"""


def tries(folder: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", TRIES, str(folder)]
    return subprocess.run(words, capture_output=True, text=True, timeout=240)


def test_a_second_process_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    with only_one(tmp_path / "run", what="run"):
        refused = tries(tmp_path / "run")
    assert refused.returncode != 0
    assert "is in use by another process" in refused.stderr
    assert tries(tmp_path / "run").returncode == 0
    assert tries(tmp_path / "other").returncode == 0


def test_a_system_without_such_locks_does_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSYS, "no locks")

    monkeypatch.setattr("filelock.FileLock.acquire", no_locks)
    with only_one(tmp_path, what="run"), only_one(tmp_path, what="run"):
        pass


def test_and_so_is_the_same_one(tmp_path: Path) -> None:
    with only_one(tmp_path, what="run"):
        with pytest.raises(TrainkitError, match="run: .* is in use by another process"):
            with only_one(tmp_path, what="run"):
                pass
    with only_one(tmp_path, what="run"):
        pass


def test_what_a_process_has_forked_does_not_hold_it(tmp_path: Path) -> None:
    """The workers of a loader outlive a run that was killed by seconds."""
    with only_one(tmp_path, what="run"):
        worker = get_context("fork").Process(
            target=time.sleep, args=(600,), daemon=True
        )
        worker.start()
    try:
        assert tries(tmp_path).returncode == 0
    finally:
        worker.kill()
        worker.join()
