"""The folder of a run: its files, and the lock that keeps other processes out."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import yaml
from filelock import FileLock, Timeout

from trainkit.errors import TrainkitError
from trainkit.pages.atomic_file import write_atomically

_Read = TypeVar("_Read")


class RunFolder:
    """Reads and writes the files of a run.

    `config.yaml` has the resolved configuration, `overrides.yaml` the command line,
    `summary.json` the end; `report.html` and `pictures/` show them. `train.log` has
    what stood on the screen. Loggers and callbacks write `metrics.csv`, `checkpoints/`
    and `wandb/`.

    Args:
        path: the folder; it need not exist yet.
    """

    LOCK = ".lock"
    CONFIG = "config.yaml"
    OVERRIDES = "overrides.yaml"
    SUMMARY = "summary.json"
    METRICS = "metrics.csv"
    LOG = "train.log"
    CHECKPOINTS = "checkpoints"
    REPORT = "report.html"
    PICTURES = "pictures"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()

    @property
    def log(self) -> Path:
        return self.path / self.LOG

    @property
    def checkpoints(self) -> Path:
        return self.path / self.CHECKPOINTS

    def newest_checkpoint(self) -> Path | None:
        """`last.ckpt`, or else the newest checkpoint, or None."""
        for name in ("last.ckpt", "last.ckpt.old"):  # old: killed while replacing it
            if (self.checkpoints / name).exists():
                return self.checkpoints / name
        others = sorted(self.checkpoints.glob("*.ckpt"), key=_written)
        return others[-1] if others else None

    def is_of_a_run(self) -> bool:
        """Whether a run has begun in this folder."""
        return (self.path / self.OVERRIDES).is_file()

    @classmethod
    def around(cls, path: Path) -> RunFolder | None:
        """The run in whose folder a path is, or None."""
        folders = map(cls, path.parents)
        return next((each for each in folders if each.is_of_a_run()), None)

    def started(self) -> float:
        """When the run was last started or resumed."""
        return _written(self.path / self.OVERRIDES)

    def read(self, name: str, how: Callable[[Path], _Read]) -> _Read:
        """What a file holds, as `how` reads it.

        Raises:
            TrainkitError: the file is damaged.
        """
        path = self.path / name
        damages = (ValueError, TypeError, AttributeError, LookupError)
        try:
            return how(path)
        except (*damages, csv.Error, yaml.YAMLError) as error:
            said = " ".join(f"{type(error).__name__}: {error}".split())
            raise TrainkitError(
                f"{path}: must be as a run writes it, and is damaged: {said}. Mend it "
                f"or remove it."
            ) from error

    def overrides(self) -> list[str]:
        """The command line of the run."""
        words = self.read(self.OVERRIDES, lambda path: yaml.safe_load(path.read_text()))
        return words or []

    def write_start(self, config: Mapping[str, Any], overrides: Sequence[str]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self.write(self.CONFIG, yaml.safe_dump(dict(config), sort_keys=False))
        self.write(self.OVERRIDES, yaml.safe_dump(list(overrides)))

    def read_summary(self) -> dict[str, Any]:
        """How the run has ended; empty if it has not."""
        if not (self.path / self.SUMMARY).is_file():
            return {}
        return self.read(
            self.SUMMARY, lambda path: dict(json.loads(path.read_text("utf-8")))
        )

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        text = json.dumps(dict(content), indent=2, allow_nan=False)
        self.write(name, f"{text}\n")

    def write(self, name: str, text: str) -> None:
        """Write a file whole or not at all."""
        write_atomically(self.path / name, text)


def _written(path: Path) -> float:
    return path.stat().st_mtime


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
    lock = FileLock(folder.absolute() / RunFolder.LOCK)
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


def wandb_run_of(save_dir: str | Path | None) -> str | None:
    """The id of the newest W&B run that has left its files in a folder, or None."""
    if save_dir is None:
        return None
    files = Path(save_dir, "wandb").glob("*run-*/run-*.wandb")

    def started(file: Path) -> str:
        return file.parent.name.removeprefix("offline-")

    newest = max(files, key=started, default=None)
    return None if newest is None else newest.stem.removeprefix("run-")
