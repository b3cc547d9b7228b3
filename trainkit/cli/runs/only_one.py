"""A lock that lets one process at a time write to a folder."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainkit.errors import TrainkitError

FILE = ".lock"

_held: set[Path] = set()
"""The locks of this process, to which the system would grant them a second time."""


@contextmanager
def only_one(folder: Path, *, what: str) -> Iterator[None]:
    """Lock a folder, and refuse it to a second process.

    The lock ends with the process, however that ends. Child processes do not inherit
    it. On a system without such locks the folder is not locked.

    Args:
        folder: created if it does not exist.
        what: the option that names the folder, for the message.

    Raises:
        TrainkitError: another process has locked the folder.
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
                f"{file.read().strip() or 'unknown'}, which is running. Wait until "
                f"it ends, or stop it."
            ) from error
        _held.add(path)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        try:
            yield
        finally:
            _held.discard(path)
