"""Becomes a fork of `fork_server`, as far as anybody can see."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from typing import Any

MODULES = (
    "trainkit",
    "trainkit.__main__",
    "wandb",
    "torch.distributed.run",
    "joblib.externals.loky.backend.popen_loky_posix",
    "submitit.core._submit",
)
RANKS = "from multiprocessing.forkserver import main"
WORKER = "import sys;exec(eval(sys.stdin.readline()))"  # of pytest-xdist, by execnet
HANDED_ON = [
    getattr(signal, f"SIG{name}")
    for name in ("HUP", "INT", "QUIT", "TERM", "USR1", "USR2", "CONT")
]


def words() -> list[str] | None:
    """This process's command line, if it runs what is named above, or a script."""
    found = [word for word in sys.orig_argv if word not in ("-u", "-B")]
    if found[1:2] == ["-c"] and found[2].startswith((RANKS, WORKER)):
        return found
    if found[1:2] == ["-m"]:
        return found if found[2] in MODULES else None
    return None if len(found) < 2 or found[1].startswith("-") else found


def become_fork(address: str, words: list[str]) -> None:
    """Run this process's command in a fork, and end as that ends."""
    files = sorted(int(name) for name in os.listdir("/proc/self/fd"))
    files = [number for number in files if _is_open(number)]
    umask = os.umask(0)
    os.umask(umask)
    asked: dict[str, Any] = {
        "words": words,
        "path": sys.path,
        "env": dict(os.environ),
        "folder": os.getcwd(),
        "umask": umask,
        "parent": os.getppid(),
        "files": files,
        "ignored": [n for n in HANDED_ON if signal.getsignal(n) == signal.SIG_IGN],
    }
    server = socket.socket(socket.AF_UNIX)
    server.connect(address)
    fork: list[int] = []
    early: list[int] = []

    def hand_on(number: int, frame: Any) -> None:
        if not fork:
            early.append(number)
        else:
            try:
                os.kill(fork[0], number)
            except ProcessLookupError:
                pass  # its end is on the way

    for number in HANDED_ON:
        signal.signal(number, hand_on)
    text = json.dumps(asked).encode()
    socket.send_fds(server, [len(text).to_bytes(8, "big")], files)
    server.sendall(text)
    fork.append(_number(server))
    for number in early:
        hand_on(number, None)
    status = _number(server)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False  # the folder that was listed
    return True


def _number(server: socket.socket) -> int:
    read = server.recv(8, socket.MSG_WAITALL)
    if len(read) < 8:
        os._exit(70)  # the tests have ended
    return int.from_bytes(read, "big")
