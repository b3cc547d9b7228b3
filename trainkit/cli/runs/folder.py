"""The folder of a run: what stands in it, and where."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml


class RunFolder:
    """Reads and writes what a run leaves behind.

    `config.yaml` is the resolved configuration, `overrides.yaml` what was asked for on
    the command line, `summary.json` how it ended; `learning_rate_plan.json` is what the
    rates were to be, and `report.html` with `pictures/` what all of it looks like;
    `metrics.csv`, `checkpoints/` and `wandb/` are written by those who fill them.

    Args:
        path: the folder; it need not be there yet.
    """

    CONFIG = "config.yaml"
    OVERRIDES = "overrides.yaml"
    SUMMARY = "summary.json"
    METRICS = "metrics.csv"
    CHECKPOINTS = "checkpoints"
    RATE_PLAN = "learning_rate_plan.json"
    REPORT = "report.html"
    PICTURES = "pictures"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()

    @property
    def checkpoints(self) -> Path:
        return self.path / self.CHECKPOINTS

    def newest_checkpoint(self) -> Path | None:
        """`last.ckpt`, or else the newest that is there."""
        for name in ("last.ckpt", "last.ckpt.old"):  # killed while it was replaced
            if (self.checkpoints / name).exists():
                return self.checkpoints / name
        others = sorted(self.checkpoints.glob("*.ckpt"), key=_written)
        return others[-1] if others else None

    def is_of_a_run(self) -> bool:
        """Whether a run has begun in it."""
        return (self.path / self.OVERRIDES).is_file()

    def started(self) -> float:
        """When the run was started or continued last."""
        return _written(self.path / self.OVERRIDES)

    def overrides(self) -> list[str]:
        return yaml.safe_load((self.path / self.OVERRIDES).read_text()) or []

    def write_start(self, config: Mapping[str, Any], overrides: Sequence[str]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self._write(self.CONFIG, yaml.safe_dump(dict(config), sort_keys=False))
        self._write(self.OVERRIDES, yaml.safe_dump(list(overrides)))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        self._write(
            self.SUMMARY, json.dumps(dict(summary), indent=2, allow_nan=False) + "\n"
        )

    def read_summary(self) -> dict[str, Any] | None:
        return self._read_json(self.SUMMARY)

    def write_rate_plan(self, plan: Mapping[str, Any]) -> None:
        self._write(self.RATE_PLAN, json.dumps(dict(plan), allow_nan=False) + "\n")

    def read_rate_plan(self) -> Any:
        try:
            return self._read_json(self.RATE_PLAN)
        except ValueError:  # nothing depends on it: a damaged one is as good as none
            return None

    def write_report(self, page: str) -> None:
        self._write(self.REPORT, page)

    def _read_json(self, name: str) -> dict[str, Any] | None:
        path = self.path / name
        return json.loads(path.read_text()) if path.is_file() else None

    def _write(self, name: str, text: str) -> None:
        """All of it or nothing: a run may be killed at any moment."""
        unfinished = self.path / f".{name}.{os.getpid()}"
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(self.path / name)


def _written(path: Path) -> float:
    return path.stat().st_mtime
