"""`metrics.csv`: its rows, read and written without Lightning."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path

Row = dict[str, str]
"""The cells of a row by column, without empty cells."""

FIRST = ("step", "epoch")
"""The columns that come first."""
_NUM_RECENT = 64
"""How many rows back a late value still joins the row of its step."""


def read_rows(path: Path) -> list[Row]:
    """All rows of the file, without a last row that was not written to its end."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    found = csv.DictReader(io.StringIO(whole, newline=""))
    return [{name: cell for name, cell in row.items() if cell} for row in found]


class MetricFile:
    """A file with a row for each step.

    A row is given to the operating system at once, in one call. A new metric adds a
    column; the file is then written again and replaced in one step.

    Attributes:
        path: the file.
        has_written: whether this object has written a row.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.has_written = False
        self._columns: list[str] | None = None
        self._num_rows = 0
        self._recent: list[tuple[int, Row]] = []  # with their places in the file

    @property
    def num_rows(self) -> int:
        """How many rows the file has."""
        self._open()
        return self._num_rows

    def rows(self) -> list[Row]:
        """All rows of the file, without a last row that was not written to its end."""
        return read_rows(self.path)

    def make_folder(self) -> None:
        """Make the folder of the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def append(self, row: Row) -> None:
        """Write a row, or join it to the row of its step."""
        columns = self._open()
        self.has_written = True
        if not row.keys() <= set(columns):
            self.replace(self.rows(), more=row)
        recent = [each for _, each in self._recent]
        place = _place_of(row, recent)
        before, *later = recent[place:] or [{}]
        if not row.items() <= before.items():
            self._write([{**before, **row}, *later], place)

    def replace(self, rows: list[Row], *, more: Iterable[str] = ()) -> None:
        """Write the file again, with these rows, and columns for more names."""
        names = dict.fromkeys([name for row in rows for name in row] + [*more])
        first = [name for name in FIRST if name in names or name == "step"]
        columns = [*first, *(name for name in names if name not in FIRST)]
        self.make_folder()
        new = self.path.with_name(self.path.name + ".new")
        new.write_bytes(_line(columns, {name: name for name in columns}))
        self._columns, self._num_rows, self._recent = columns, 0, []
        self._write(rows, 0, path=new)
        os.replace(new, self.path)

    def set_aside(self) -> Path:
        """Rename the file, and begin a new one."""
        number = 1
        while (renamed := self.path.with_suffix(f".{number}.csv")).exists():
            number += 1
        os.replace(self.path, renamed)
        self._columns, self._num_rows, self._recent = None, 0, []
        return renamed

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

    def _open(self) -> list[str]:
        """The columns of the file, which is read once."""
        if self._columns is None:
            self._columns, rows = [], self.rows()
            if rows:
                self.replace(rows)  # without a last row that was cut off
        return self._columns


def _place_of(row: Row, rows: Sequence[Row]) -> int:
    """The place of the last row of its step, which it can join; else after all rows.

    It cannot join if both have different values of a metric.
    """
    for place in reversed(range(len(rows))):
        there = rows[place]
        if "step" in row and there.get("step") == row["step"]:
            is_alike = all(there.get(name, cell) == cell for name, cell in row.items())
            return place if is_alike else len(rows)
    return len(rows)


def _line(columns: list[str], row: Row) -> bytes:
    text = io.StringIO(newline="")
    csv.DictWriter(text, columns, restval="", lineterminator="\n").writerow(row)
    return text.getvalue().encode()
