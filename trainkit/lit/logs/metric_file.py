"""The rows of a `metrics.csv`, read without Lightning."""

from __future__ import annotations

import csv
import io
from pathlib import Path

Row = dict[str, str]
"""The cells of a row by column, without empty cells."""


def read_rows(path: Path) -> list[Row]:
    """All rows of the file, without a last row that was not written to its end."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    found = csv.DictReader(io.StringIO(whole, newline=""))
    return [{name: cell for name, cell in row.items() if cell} for row in found]
