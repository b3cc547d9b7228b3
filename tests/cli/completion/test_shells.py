"""What Tab does in bash, zsh and fish themselves."""

from __future__ import annotations

import fcntl
import os
import pty
import shutil
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.startup import forked


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A folder with a `trainkit` that completes, and writes down what it would run."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "trainkit"
    program.write_text(
        f"""#!/bin/sh
if [ "$1" = completion ] || [ -n "$_ARGCOMPLETE" ]; then
    exec "{sys.executable}" -m trainkit "$@"
fi
echo "$*" > "{tmp_path}/ran.new"
mv "{tmp_path}/ran.new" "{tmp_path}/ran"
"""
    )
    program.chmod(0o755)
    return folder


def environment(commands: Path) -> dict[str, str]:
    """What the shells start with: nothing of the user's."""
    return {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "HOME": os.environ["HOME"],
        "XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"],
        **forked(),
        "TERM": "xterm",
        "LANG": "C.UTF-8",
    }


SHELLS = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
LOAD = {
    "bash": 'eval "$(trainkit completion bash)"\n',
    "zsh": 'eval "$(trainkit completion zsh)"\n',
    "fish": "trainkit completion fish | source\n",
}


@contextmanager
def terminal(argv: list[str], env: dict[str, str], folder: Path) -> Iterator[int]:
    """A program that believes a person types; its keyboard is yielded."""
    ours, theirs = pty.openpty()
    program = subprocess.Popen(
        argv,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=env,
        cwd=folder,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # or fish leaves
    )
    os.close(theirs)
    os.set_blocking(ours, False)
    try:
        yield ours
    finally:
        program.kill()
        program.wait(timeout=240)
        os.close(ours)


def type_and_wait(keyboard: int, keys: str, ran: Path) -> str:
    """What the command was run with, once it was."""
    os.write(keyboard, keys.encode())
    deadline = time.monotonic() + 240
    while not ran.exists():
        assert time.monotonic() < deadline, f"nothing ran after {keys!r}"
        time.sleep(0.02)
        try:
            os.read(keyboard, 65536)  # or the shell would wait for its terminal
        except BlockingIOError:
            continue
    words = ran.read_text().strip()
    ran.unlink()
    return words


@pytest.mark.parametrize("shell", SHELLS)
def test_tab_completes_what_is_then_run(
    shell: str, commands: Path, tmp_path: Path
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "sweep_of_rates.yaml").touch()
    typed = {
        "trainkit pla\t --rule sq\t\n": "plan --rule sqrt",
        "trainkit plan --rule=sq\t\n": "plan --rule=sqrt",
        "trainkit train accumulation=per_t\t\n": "train accumulation=per_token",
        "trainkit train trainer.max_st\t5\n": "train trainer.max_steps=5",
        "trainkit sweep sweep_o\t--json\n": "sweep sweep_of_rates.yaml --json",
    }
    argv = [shutil.which(shell) or shell, *SHELLS[shell][1:]]
    with terminal(argv, environment(commands), tmp_path) as keyboard:
        os.write(keyboard, LOAD[shell].encode())
        for keys, words in typed.items():
            ran = type_and_wait(keyboard, keys, tmp_path / "ran")
            assert " ".join(ran.split()) == words
