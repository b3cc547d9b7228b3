"""One process at a time for what writes to a folder."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainkit.errors import TrainkitError

FILE = ".lock"

_held: set[Path] = set()
"""By this process, to which the system would give them again."""


@contextmanager
def only_one(folder: Path, *, what: str) -> Iterator[None]:
    """Hold a folder; a second process is refused.

    The lock is the process's own: it goes with it, however it ends, and those that it
    has started do not have it. Where the system has no such lock there is none.

    Args:
        folder: made if it is not there.
        what: names its owner, for the message.

    Raises:
        TrainkitError: another process holds it.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = (folder / FILE).absolute()
    with path.open("a+") as file:
        try:
            if path in _held:
                raise BlockingIOError
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (None, errno.EACCES, errno.EAGAIN):
                yield
                return
            file.seek(0)
            raise TrainkitError(
                f"{what}: {folder} is in use by process "
                f"{file.read().strip() or 'unknown'}, which is running. Wait for its "
                f"end, or stop it."
            ) from error
        _held.add(path)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        try:
            yield
        finally:
            _held.discard(path)
