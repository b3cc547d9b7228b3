"""A lock that lets one process at a time write to a folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from trainkit.errors import TrainkitError

FILE = ".lock"


@contextmanager
def only_one(folder: Path, *, what: str) -> Iterator[None]:
    """Lock a folder, and refuse it to a second process.

    The lock ends with the process, however that ends. Child processes do not inherit
    it. On a file system without locks the folder is not locked.

    Args:
        folder: created if it does not exist.
        what: the option that names the folder, for the message.

    Raises:
        TrainkitError: another process has locked the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.absolute() / FILE)
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        raise TrainkitError(
            f"{what}: {folder} is in use by another process, which is running. Wait "
            f"until it ends, or stop it."
        ) from error
    except (NotImplementedError, OSError):
        pass
    try:
        yield
    finally:
        lock.release()
