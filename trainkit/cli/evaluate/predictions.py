"""Writes the predictions of a run, batch by batch."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from lightning.pytorch.callbacks import BasePredictionWriter

from trainkit.cli.evaluate.rows import Row, rows_of
from trainkit.errors import TrainkitError

CSV, JSONL = "predictions.csv", "predictions.jsonl"
LOADER = "dataloader"
"""The column that says which of several loaders a row is of."""


class Predictions(BasePredictionWriter):
    """Writes each batch's rows as soon as they are there, and keeps none of them.

    The first batch decides the format: `predictions.csv` if each of its values is one
    number or text, else `predictions.jsonl`. The file gets its name when it is
    complete; the file of an earlier prediction is then replaced.

    Args:
        folder: the folder of the run.

    Attributes:
        num_rows: how many rows it has written.
        path: the complete file, or None.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(write_interval="batch")
        self.folder = folder
        self.num_rows = 0
        self.path: Path | None = None
        self._columns: list[str] | None = None
        self._file: TextIO | None = None

    def write_on_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        prediction: Any,
        batch_indices: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        if prediction is None:
            return  # the module writes by itself
        rows = rows_of(prediction, len(batch_indices) if batch_indices else None)
        if len(trainer.num_predict_batches) > 1:
            rows = [{LOADER: dataloader_idx, **row} for row in rows]
        if rows:
            self._write(rows)

    def on_predict_end(self, trainer: Any, pl_module: Any) -> None:
        if self._file is None:
            return
        self._file.close()
        name, other = (JSONL, CSV) if self._columns is None else (CSV, JSONL)
        self.path = self.folder / name
        os.replace(self._file.name, self.path)
        (self.folder / other).unlink(missing_ok=True)
        self._file = None

    def close(self) -> None:
        """Remove the file of a prediction that did not end."""
        if self._file is not None:
            self._file.close()
            Path(self._file.name).unlink(missing_ok=True)
            self._file = None

    def _write(self, rows: list[Row]) -> None:
        if self._file is None:
            unfinished = self.folder / f".predictions.{os.getpid()}"
            self._file = unfinished.open("w", encoding="utf-8", newline="")
            if _is_flat(rows):
                self._columns = list(rows[0])
                csv.writer(self._file).writerow(self._columns)
        self.num_rows += len(rows)
        if self._columns is None:
            self._file.writelines(json.dumps(row, default=str) + "\n" for row in rows)
            return
        self._refuse_others(rows)
        lines = ([row[name] for name in self._columns] for row in rows)
        csv.writer(self._file).writerows(lines)

    def _refuse_others(self, rows: Iterable[Row]) -> None:
        for row in rows:
            if list(row) != self._columns or not _is_flat([row]):
                raise TrainkitError(
                    f"predict_step: all batches must have the columns of the first "
                    f"one, {self._columns}, each with one number or text, received "
                    f"{row}. Return the same names and shapes for each batch."
                )


def _is_flat(rows: list[Row]) -> bool:
    names = list(rows[0])
    return all(
        list(row) == names
        and not any(isinstance(value, list | dict) for value in row.values())
        for row in rows
    )
