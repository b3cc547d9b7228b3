"""A process that has imported everything, and forks one for each that asks.

It imports when the first one asks: tests that start no process cost nothing. With
`now` as its second argument it imports at once.
The asking process (`fork_client`) sends its command line, environment, folder and open
files. It stays: it hands signals on, and ends as its fork ends. If it is killed, its
fork is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import json
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import sys
import threading
import warnings
import weakref
from types import ModuleType
from typing import Any, NoReturn

IMPORTED = (
    "numpy",
    "requests",
    "psutil",
    "torch.distributed.run",
    "lightning.pytorch.cli",
    "lightning.pytorch.loggers",
    "hydra.main",
    "hydra.experimental.callback",
    "hydra._internal.core_plugins.basic_launcher",
    "hydra_plugins.trainkit_searchpath",
    "matplotlib.backends.backend_agg",
    "pytest",  # which the modules of tests import, in their ranks too
    "wandb.apis.public",
    "wandb.cli.cli",
    "wandb.sdk.launch",
    "wandb.sdk.lib.gitlib",
)
OPTIONAL = ("joblib", "optuna", "submitit", "torch.utils.serialization")
MOST_FILES = 64
ABOVE = 1000  # the numbers of any process's files


class Server:
    """Forks for each process that asks; ends when its standard input does."""

    def __init__(self, address: str) -> None:
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(address)
        self._listening.listen(64)
        self._woken, waking = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
        self._forks: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        for each in (self._listening, self._woken, sys.stdin.fileno()):
            self._selector.register(each, selectors.EVENT_READ)

    def wait(self) -> None:
        """Return when the first process asks."""
        asking = [key for key, _ in self._selector.select()]
        if any(key.fd == sys.stdin.fileno() for key in asking):
            os._exit(0)

    def serve(self) -> dict[str, Any]:
        """Returns in a fork, with what was asked for."""
        while True:
            for key, _ in self._selector.select():
                if key.fd == sys.stdin.fileno():
                    for pid in self._forks:
                        _kill(pid)
                    os._exit(0)
                elif key.fd == self._woken:
                    os.read(self._woken, 4096)
                    self._reap()
                elif key.fd == self._listening.fileno():
                    if wanted := self._fork():
                        return wanted
                elif key.fd in self._selector.get_map():  # who asked was killed
                    self._selector.unregister(key.fd)
                    _kill(key.data)

    def _fork(self) -> dict[str, Any] | None:
        connection, _ = self._listening.accept()
        head, files, _, _ = socket.recv_fds(connection, 8, MOST_FILES)
        size = int.from_bytes(head, "big")
        text = connection.recv(size, socket.MSG_WAITALL)
        if not text or len(text) < size:  # who asked was killed
            connection.close()
            pid = -1
        else:
            pid = os.fork()
        if pid == 0:
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            wanted = json.loads(text)
            for each in (connection, self._listening, *self._forks.values()):
                each.detach()  # or its end would close the file that has its number
            self._selector.close()
            _take(wanted["files"], files)
            return wanted
        for file in files:
            os.close(file)
        if pid > 0:
            self._forks[pid] = connection
            connection.sendall(pid.to_bytes(8, "big"))
            self._selector.register(connection, selectors.EVENT_READ, pid)
        return None

    def _reap(self) -> None:
        for pid in list(self._forks):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            connection = self._forks.pop(pid)
            if connection.fileno() in self._selector.get_map():
                self._selector.unregister(connection)
            try:
                connection.sendall(status.to_bytes(8, "big"))
            except OSError:
                pass  # it was killed
            connection.close()


def _kill(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # it may not have made its session yet
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def _take(numbers: list[int], files: list[int]) -> None:
    """Have the files of the process that asked, and none of the server's."""
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, ABOVE) for file in files]
    os.closerange(0, ABOVE)
    for number, file in zip(numbers, high, strict=True):
        os.dup2(file, number)
        os.close(file)


def become(wanted: dict[str, Any]) -> None:
    """Be the process that asked, but for its number."""
    os.chdir(wanted["folder"])
    os.umask(wanted["umask"])
    os.environ.clear()
    os.environ.update(wanted["env"])
    os.getppid = lambda: wanted["parent"]
    if signal.SIGINT not in wanted["ignored"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in wanted["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    sys.orig_argv[:] = wanted["words"]
    sys.path[:] = wanted["path"]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        is_buffered = name != "stderr" and "PYTHONUNBUFFERED" not in os.environ
        file = os.fdopen(
            number,
            "w" if number else "r",
            buffering=-1 if is_buffered and not os.isatty(number) else 1,
            errors="backslashreplace" if name == "stderr" else None,
            closefd=False,
        )
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)
    sys.modules["numpy"].random.seed()  # Python's own is seeded anew in a fork
    sys.modules["sitecustomize"].ask_often()


def run(words: list[str]) -> NoReturn:
    """Run `-c CODE`, `-m MODULE ...` or `SCRIPT ...`, and end as an interpreter does.

    What it has imported is not taken down: that would copy all the server's memory.
    """
    status = 0
    try:
        _run(words)
    except SystemExit as end:
        status = _status_of(end.code)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    with contextlib.suppress(KeyboardInterrupt):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # it is closed
            file.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _status_of(code: Any) -> int:
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


def _run(words: list[str]) -> None:
    if words[0] == "-c":
        sys.argv = ["-c"]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(words[1], vars(main))
        return
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = words
    sys.path.insert(0, os.path.dirname(os.path.realpath(words[0])))
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__ = words[0]
    with open(words[0]) as file:
        program = compile(file.read(), words[0], "exec")
    exec(program, vars(main))


def import_all() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    for name in OPTIONAL:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for name in ("trainkit", "trainkit.recipes"):
        path = importlib.import_module(name).__path__[:1]  # in a clone, tests follow
        for found in pkgutil.walk_packages(path, f"{name}."):
            if not found.name.endswith("__main__"):
                importlib.import_module(found.name)
    compose_once()
    read_once()
    for finalizer in getattr(weakref.finalize, "_registry", ()):
        finalizer.atexit = False  # torch would take its operators down: 40 ms
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)  # as in `conftest`


def compose_once() -> None:
    """Hydra then knows its plugins, and its grammar: 0.2 s of each training."""
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    from trainkit.config import register
    from trainkit.config._compat import VERSION_BASE

    register()
    with initialize_config_module("trainkit.conf", **VERSION_BASE):
        compose("train", ["experiment=demo", "seed=1", "optimizer.lr=0.1"])
    GlobalHydra.instance().clear()


def read_once() -> None:
    """The data of most trainings, which is in some hundred files: 0.1 s of each."""
    code_lm = importlib.import_module("trainkit.recipes.code_lm.code_lm")
    code_lm.read_functions = functools.cache(code_lm.read_functions)  # type: ignore[attr-defined]
    code_lm.read_functions()


if __name__ == "__main__":
    server = Server(sys.argv[1])
    print("ready", flush=True)
    if "now" not in sys.argv[2:]:
        server.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import_all()
    wanted = server.serve()
    become(wanted)
    run(wanted["words"][1:])
