"""A logger that writes `metrics.csv` and keeps its rows when a run resumes."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers.logger import Logger

from trainkit.errors import TrainkitError
from trainkit.lit.logs.metric_file import Row, read_rows

FIRST = ("step", "epoch")
"""The columns that come first."""
_NUM_RECENT = 64
"""How many rows back a late value still joins the row of its step."""


class MetricsCSVLogger(Logger):
    """Writes `metrics.csv`: a row for each step, with a column for each metric.

    What is logged later for the same step joins its row; a second value of one metric
    begins another row. A row is given to the operating system at once, so a killed
    process loses none. A new metric adds a column; the file is then written again and
    replaced in one step. Numbers keep all their digits.

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
        self._recent: list[tuple[int, Row]] = []

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

    def make_folder(self) -> None:
        """Make the folder of the file.

        Raises:
            TrainkitError: it cannot be made.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TrainkitError(
                f"MetricsCSVLogger save_dir: must be a folder that can be written, "
                f"received {self.save_dir}: {error}. Choose another."
            ) from error

    def rows(self) -> list[Row]:
        """All rows of the file, without a last row that was not written to its end."""
        return read_rows(self.path)

    def append(self, row: Row) -> None:
        """Write a row, or join it to the row of its step."""
        columns = self._open()
        self.has_written = True
        if not row.keys() <= set(columns):
            self.replace(self.rows(), more=row)
        recent = [each for _, each in self._recent]
        place = _place_of(row, recent)
        if place is None:
            self._write([row], len(recent))
        elif not row.items() <= recent[place].items():
            grown = {**recent[place], **row}
            self._write([grown, *recent[place + 1 :]], place)

    def replace(self, rows: list[Row], *, more: Iterable[str] = ()) -> None:
        """Write the file again, with these rows, and columns for more names."""
        names = dict.fromkeys([name for row in rows for name in row] + [*more])
        first = [name for name in FIRST if name in names or name == "step"]
        columns = [*first, *(name for name in names if name not in FIRST)]
        self.make_folder()
        new = self.path.with_name(self.path.name + ".new")
        header = dict(zip(columns, columns, strict=True))
        new.write_bytes(_line(columns, header))
        self._columns, self._num_rows, self._recent = columns, 0, []
        self._write(rows, 0, path=new)
        os.replace(new, self.path)

    def _write(self, rows: list[Row], place: int, path: Path | None = None) -> None:
        """Write the last rows in one call, in place of the recent ones from a place."""
        lines = [_line(self._open(), row) for row in rows]
        replaced = self._recent[place:]
        with (path or self.path).open("r+b", buffering=0) as file:
            start = file.seek(replaced[0][0] if replaced else 0, 0 if replaced else 2)
            file.write(b"".join(lines))  # never shorter than what was there
        self._num_rows += len(rows) - len(replaced)
        starts = accumulate(map(len, lines), initial=start)
        self._recent[place:] = zip(starts, rows, strict=False)
        del self._recent[:-_NUM_RECENT]

    def set_aside(self) -> Path:
        """Rename the file, and begin a new one."""
        number = 1
        while (renamed := self.path.with_suffix(f".{number}.csv")).exists():
            number += 1
        os.replace(self.path, renamed)
        self._columns, self._num_rows, self._recent = None, 0, []
        return renamed

    def _open(self) -> list[str]:
        """The columns of the file, which is read once."""
        if self._columns is None:
            self._columns, rows = [], self.rows()
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


def _place_of(row: Row, rows: Sequence[Row]) -> int | None:
    """Where among some rows is the last of its step, if the row can join it.

    It cannot if both have different values of a metric.
    """
    for place in reversed(range(len(rows))):
        there = rows[place]
        if "step" in row and there.get("step") == row["step"]:
            is_alike = all(there.get(name, cell) == cell for name, cell in row.items())
            return place if is_alike else None
    return None


def _line(columns: list[str], row: Row) -> bytes:
    text = io.StringIO(newline="")
    csv.DictWriter(text, columns, restval="", lineterminator="\n").writerow(row)
    return text.getvalue().encode()
