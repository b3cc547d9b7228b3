"""`train.log`: what was shown while a run trained."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_ERASE = "\x1b[2K"
"""After it a progress bar of rich draws itself again, or what is printed above it."""
_UP = "\x1b[1A"
"""How a drawing of several lines begins; so many of its lines are drawn again."""
_CODES = re.compile(
    r"\x1b\[[0-9;?]*[@-~]"  # such as: bold, erase the line
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # a title or a link
    r"|\x1b[^\[\]]"
)


class ScreenLog:
    """Writes a file with the lines that are shown, but for those of progress bars.

    They are kept until the file is opened, and are forgotten if it never is. Only the
    process that made it writes: forked workers share the screen, but not the file.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._lines: list[str] = []
        self._rest = ""
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._is_over = False

    def open(self, path: Path) -> None:
        """Append to a file, first what was shown before."""
        self._path = path
        self._save()

    def write(self, text: str) -> None:
        """Add a text, without showing it."""
        if self._is_over or os.getpid() != self._process:
            return
        with self._lock:
            *lines, rest = (self._rest + text.replace("\r\n", "\n")).split("\n")
            self._rest = _last_drawn(rest)
            drawn = map(_last_drawn, lines[: max(0, len(lines) - text.count(_UP))])
            # What begins with a return is a bar of tqdm.
            self._lines += [_CODES.sub("", each) for each in drawn if "\r" not in each]
            self._save()

    def close(self) -> None:
        if self._rest:
            self.write("\n")
        self._is_over = True

    def _save(self) -> None:
        if self._path is None or self._is_over:
            return
        text = "".join(f"{line.rstrip()}\n" for line in self._lines)
        self._lines = []
        try:
            with self._path.open("ab", buffering=0) as file:
                file.write(text.encode(errors="backslashreplace"))
        except OSError as error:  # a training must not fail because of its log
            self._is_over = True
            print(f"trainkit | train.log: is not written: {error}", file=sys.stderr)


def _last_drawn(line: str) -> str:
    return line.rpartition(_ERASE)[2]


class _Shown:
    """A stream of the screen, of which a log keeps what is written."""

    def __init__(self, stream: Any, log: ScreenLog) -> None:
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        written = self._stream.write(text)
        self._log.write(text)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def screen_log() -> Iterator[ScreenLog]:
    """Let a log keep what is printed or logged to the screen."""
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


def _redirect_handlers(old: Any, new: Any) -> None:
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for handler in {h for each in loggers for h in getattr(each, "handlers", ())}:
        if isinstance(handler, logging.StreamHandler) and handler.stream is old:
            handler.setStream(new)
