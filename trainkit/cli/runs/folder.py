"""The folder of a run and its files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from trainkit.pages.atomic_file import write_atomically


class RunFolder:
    """Reads and writes the files of a run.

    `config.yaml` has the resolved configuration, `overrides.yaml` the command line,
    `summary.json` the end; `report.html` and `pictures/` show them. `train.log` has
    what stood on the screen. Loggers and callbacks write `metrics.csv`, `checkpoints/`
    and `wandb/`.

    Args:
        path: the folder; it need not exist yet.
    """

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

    def started(self) -> float:
        """When the run was last started or resumed."""
        return _written(self.path / self.OVERRIDES)

    def overrides(self) -> list[str]:
        return yaml.safe_load((self.path / self.OVERRIDES).read_text()) or []

    def write_start(self, config: Mapping[str, Any], overrides: Sequence[str]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self.write(self.CONFIG, yaml.safe_dump(dict(config), sort_keys=False))
        self.write(self.OVERRIDES, yaml.safe_dump(list(overrides)))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        self.write_json(self.SUMMARY, summary)

    def read_summary(self) -> dict[str, Any] | None:
        return self._read_json(self.SUMMARY)

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        text = json.dumps(dict(content), indent=2, allow_nan=False)
        self.write(name, f"{text}\n")

    def write(self, name: str, text: str) -> None:
        """Write a file whole or not at all."""
        write_atomically(self.path / name, text)

    def _read_json(self, name: str) -> dict[str, Any] | None:
        path = self.path / name
        return json.loads(path.read_text()) if path.is_file() else None


def _written(path: Path) -> float:
    return path.stat().st_mtime
