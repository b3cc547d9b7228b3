"""A logger that writes `metrics.csv` and keeps its rows when a run resumes."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers.logger import Logger

from trainkit.lit.logs.metric_file import Row, read_rows

FIRST = ("step", "epoch")
"""The columns that come first."""


class MetricsCSVLogger(Logger):
    """Writes `metrics.csv`: a row for each call, with a column for each metric.

    A row is given to the operating system at once, so a killed process loses none. A
    new metric adds a column; the file is then written again and replaced in one step.
    Numbers keep all their digits.

    With `MetricRows` among the Trainer's callbacks a resumed run continues after the
    last row that its checkpoint knows: no row is written twice, and none is lost.

    Args:
        save_dir: the folder of the file.
        filename: the name of the file.

    Attributes:
        path: the file.
        has_written: whether this logger has written a row.
    """

    def __init__(
        self, save_dir: str | os.PathLike[str], *, filename: str = "metrics.csv"
    ) -> None:
        super().__init__()
        self.path = Path(save_dir, filename)
        self.has_written = False
        self._columns: list[str] | None = None
        self._num_rows = 0

    # ---- Lightning's interface -------------------------------------------------------

    @property
    def name(self) -> str:
        """Empty, since the file lies in `save_dir` itself."""
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    @property
    def log_dir(self) -> str:
        return self.save_dir

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Write nothing: hyperparameters are not metrics."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        if metrics:
            self.append(row_of(metrics, step))

    # ---- the file --------------------------------------------------------------------

    @property
    def num_rows(self) -> int:
        """How many rows the file has."""
        self._open()
        return self._num_rows

    def rows(self) -> list[Row]:
        """All rows of the file, without a last row that was not written to its end."""
        return read_rows(self.path)

    def append(self, row: Row) -> None:
        """Write one row."""
        columns = self._open()
        self.has_written = True
        new = [name for name in row if name not in columns]
        if new:
            self.replace([*self.rows(), row])
            return
        with self.path.open("a", encoding="utf-8", newline="") as file:
            file.write(_lines(columns, [row]))
        self._num_rows += 1

    def replace(self, rows: list[Row]) -> None:
        """Write the file again, with these rows."""
        names = {name: None for row in rows for name in row}
        first = [name for name in FIRST if name in names or name == "step"]
        columns = [*first, *(name for name in names if name not in FIRST)]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_name(self.path.name + ".new")
        with new.open("w", encoding="utf-8", newline="") as file:
            file.write(_lines(columns, [dict(zip(columns, columns, strict=True))]))
            file.write(_lines(columns, rows))
        os.replace(new, self.path)
        self._columns, self._num_rows = columns, len(rows)

    def set_aside(self) -> Path:
        """Rename the file, and begin a new one."""
        number = 1
        while (renamed := self.path.with_suffix(f".{number}.csv")).exists():
            number += 1
        os.replace(self.path, renamed)
        self._columns, self._num_rows = None, 0
        return renamed

    def _open(self) -> list[str]:
        """The columns of the file, which is read once."""
        if self._columns is None:
            self._num_rows = 0
            self._columns = []
            rows = self.rows()
            if rows:
                self.replace(rows)  # without a last row that was cut off
        return self._columns


def row_of(metrics: Mapping[str, Any], step: int | None) -> Row:
    """The cells that the file gets for a call of `log_metrics`.

    >>> row_of({"loss": 0.1, "epoch": 0, "note": None}, 3)
    {'step': '3', 'epoch': '0', 'loss': '0.1'}
    """
    scalars = convert_tensors_to_scalars(dict(metrics))
    cells = {"step": step, "epoch": scalars.pop("epoch", None), **scalars}
    return {name: str(cell) for name, cell in cells.items() if cell is not None}


def _lines(columns: list[str], rows: list[Row]) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writerows(rows)
    return text.getvalue()
