"""The state of an offline sweep on disk, so that a kill loses no finished work."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainkit.cli.sweep.trial import Trial
from trainkit.errors import TrainkitError
from trainkit.pages.atomic_file import write_atomically

_VERSION = 1


@dataclass
class SweepState:
    """A sweep's trials, kept in `<folder>/state.json`.

    Attributes:
        folder: the sweep's; its name is the sweep's id.
        config: the sweep file's content when the sweep was started.
        seed: the engine's.
        trials: all of them, in the order in which they were proposed.
    """

    folder: Path
    config: dict[str, Any]
    seed: str
    trials: list[Trial] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.folder.name

    @property
    def path(self) -> Path:
        return self.folder / "state.json"

    def save(self) -> None:
        """Replace the file in one step, since a sweep may be killed at any moment."""
        content = {
            "version": _VERSION,
            "seed": self.seed,
            "config": self.config,
            "trials": [asdict(trial) for trial in self.trials],
        }
        write_atomically(self.path, json.dumps(content, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> SweepState:
        """Read a sweep's state.

        Raises:
            TrainkitError: there is no such sweep, or another trainkit wrote it.
        """
        path = folder / "state.json"
        if not path.is_file():
            known = sorted(p.parent.name for p in folder.parent.glob("*/state.json"))
            raise TrainkitError(
                f"trainkit sweep --resume: there is no sweep {folder.name!r} in "
                f"{folder.parent}. There are: {', '.join(known) or 'none'}."
            )
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["version"] != _VERSION:
            raise TrainkitError(
                f"trainkit sweep --resume: {path} has version {content['version']}, "
                f"and this trainkit reads {_VERSION}. Start a new sweep."
            )
        trials = [Trial(**trial) for trial in content["trials"]]
        return cls(folder, content["config"], content["seed"], trials)
