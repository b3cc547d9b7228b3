"""How tests start processes that need not import everything once more.

A process whose environment has `forked()` becomes a fork of a server that has imported
torch, Lightning, Hydra and W&B: five seconds less for each. So does each process that
it starts: ranks, trials, agents. `CHILD_PATH` alone gives a fresh interpreter. One
server is enough for all workers of a run: `share` starts it before them, and they are
forks themselves.
"""

import atexit
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
CHILD_PATH = os.pathsep.join([str(HERE), str(HERE.parents[1])])
"""Their PYTHONPATH: `sitecustomize.py` of this folder, and the repository."""

SHARED = "TESTS_SHARED_SERVER"


def forked() -> dict[str, str]:
    """The part of an environment that makes a process a fork, on Linux."""
    server = _server() if sys.platform == "linux" else ""
    return {"PYTHONPATH": CHILD_PATH, "TESTS_FORK_SERVER": server}


def ended(
    words: Sequence[str | Path],
    cwd: Path,
    env: Mapping[str, str] | None = None,
    *,
    timeout: float = 240,
) -> subprocess.CompletedProcess[str]:
    """A process that has ended, with what it said; it is a fork if no `env` is given.

    It is killed if it hangs.
    """
    return subprocess.run(
        words,
        cwd=cwd,
        env={**os.environ, **forked()} if env is None else env,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def share(*, at_once: bool = False) -> None:
    """Start the server for this process and those that it starts.

    With `at_once` it imports now, and not when the first process asks.
    """
    if sys.platform == "linux":
        os.environ[SHARED] = _start("now" if at_once else "")


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Make the workers of pytest-xdist that are started in here forks as well."""
    before = dict(os.environ)
    if sys.platform == "linux":
        paths = [CHILD_PATH, *before.get("PYTHONPATH", "").split(os.pathsep)]
        os.environ.update(forked(), PYTHONPATH=os.pathsep.join(filter(None, paths)))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def forget_forking() -> None:
    """In such a worker: what it starts is a fork only where a test says so."""
    if os.environ.pop("TESTS_FORK_SERVER", ""):
        sys.modules["sitecustomize"].show_hidden()
        if path := os.environ.pop("PYTHONPATH").removeprefix(CHILD_PATH):
            os.environ["PYTHONPATH"] = path.removeprefix(os.pathsep)


@cache
def _server() -> str:
    return os.environ.get(SHARED) or _start()


def _start(when: str = "") -> str:
    """Start a server; it ends with this process."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    address = f"{folder}/socket"
    env = {"PATH": os.environ["PATH"], "HOME": folder, "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, str(HERE / "fork_server.py"), address, when],
        env={**env, "PYTHONPATH": CHILD_PATH},
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    atexit.register(server.communicate)  # closes its input: it kills its forks and ends
    return address
