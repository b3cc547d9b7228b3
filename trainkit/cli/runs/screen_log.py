"""`train.log`: what stood on the screen while a run trained."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trainkit.cli.loading import is_first_rank
from trainkit.cli.runs.folder import RunFolder
from trainkit.cli.runs.screen_text import ScreenText

_MAY_CHANGE = 20
"""The lines at the end over which a progress bar may still draw."""


class ScreenLog:
    """Writes a file with the lines that stand on the screen.

    They are kept until the file is opened, and are forgotten if it never is. Only the
    process that made it writes: forked workers share the screen, but not the file.
    """

    def __init__(self) -> None:
        self._text = ScreenText()
        self._file: Any = None
        self._end = 0
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._is_over = False

    def __reduce__(self) -> Any:
        return ScreenLog, ()  # in a process of its own, where nothing is shown through

    def open(self, path: Path) -> None:
        """Append to a file; does nothing if it is open."""
        if self._file is not None or self._is_over:
            return
        try:
            self._file = path.open("a+b", buffering=0)
            self._file.seek(max(0, self._file.seek(0, os.SEEK_END) - 1))
            if self._file.read(1) not in (b"", b"\n"):  # killed within a line
                self._file.write(b"\n")
            # Appending ignores the place at which to write.
            self._file.close()
            self._file = path.open("r+b", buffering=0)
            self._end = self._file.seek(0, os.SEEK_END)
            self._save()
        except OSError as error:
            self._fail(path, error)

    def write(self, text: str) -> None:
        """Add a text, without showing it."""
        if self._is_over or os.getpid() != self._process:
            return
        with self._lock:
            self._text.write(text)
            if "\n" in text and self._file is not None:
                try:
                    self._save()
                except OSError as error:
                    self._fail(Path(self._file.name), error)

    def close(self) -> None:
        if self._file is not None and os.getpid() == self._process:
            with self._file, suppress(OSError):
                self._save()
        self._is_over = True

    def _save(self) -> None:
        done = _bytes(self._text.take(_MAY_CHANGE))
        last = self._text.lines
        if not last[-1]:
            last = last[:-1]
        self._file.seek(self._end)
        self._file.write(done + _bytes(last))
        self._file.truncate()
        self._end += len(done)

    def _fail(self, path: Path, error: OSError) -> None:
        self._is_over = True  # a training must not fail because of its log
        print(f"trainkit | {path.name}: is not written: {error}", file=sys.stderr)


def _bytes(lines: list[str]) -> bytes:
    text = "".join(f"{line.rstrip()}\n" for line in lines)
    return text.encode(errors="backslashreplace")


class _Shown:
    """A stream of the screen, of which a log keeps what is written."""

    def __init__(self, stream: Any, log: ScreenLog) -> None:
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        written = self._stream.write(text)
        self._log.write(text)
        return written

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def screen_log() -> Iterator[ScreenLog]:
    """Let a log keep what is printed or logged to the screen."""
    _without_file()
    log = ScreenLog()
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    shown = {n: _Shown(each, log) for n, each in before.items() if each is not None}
    for name, stream in shown.items():
        setattr(sys, name, stream)
        _redirect_handlers(before[name], stream)
    try:
        yield log
    finally:
        for name, stream in shown.items():
            if getattr(sys, name) is stream:
                setattr(sys, name, before[name])
            _redirect_handlers(stream, before[name])
        log.close()


def _without_file() -> None:
    """Close the file to which Hydra logs: what is logged stands on the screen too.

    Only the first rank removes it. A later one could remove the file that the first
    has opened meanwhile, and in which nothing stands yet.
    """
    for handler in list(logging.root.handlers):
        if isinstance(handler, logging.FileHandler):
            path = Path(handler.baseFilename)
            if path.name == RunFolder.LOG:
                logging.root.removeHandler(handler)
                handler.close()
                is_empty = path.exists() and not path.stat().st_size
                if is_empty and is_first_rank():
                    path.unlink()


def _redirect_handlers(old: Any, new: Any) -> None:
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for handler in {h for each in loggers for h in getattr(each, "handlers", ())}:
        if isinstance(handler, logging.StreamHandler) and handler.stream is old:
            handler.setStream(new)
