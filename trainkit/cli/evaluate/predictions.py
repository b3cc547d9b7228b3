"""Writes the predictions of a run, batch by batch, a row for each sample."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from lightning.pytorch.callbacks import BasePredictionWriter

from trainkit.errors import TrainkitError

CSV, JSONL = "predictions.csv", "predictions.jsonl"

Row = dict[str, Any]


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
            rows = [{"dataloader": dataloader_idx, **row} for row in rows]
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
        names = list(rows[0])
        is_flat = not any(isinstance(x, list | dict) for r in rows for x in r.values())
        if self._file is None:
            unfinished = self.folder / f".predictions.{os.getpid()}"
            self._file = unfinished.open("w", encoding="utf-8", newline="")
            if is_flat:
                self._columns = names
                csv.writer(self._file).writerow(names)
        self.num_rows += len(rows)
        if self._columns is None:
            self._file.writelines(json.dumps(row, default=str) + "\n" for row in rows)
        elif names == self._columns and is_flat:
            csv.writer(self._file).writerows(row.values() for row in rows)
        else:
            raise TrainkitError(
                f"predict_step: all batches must have the columns of the first one, "
                f"{self._columns}, each with one number or text, received {rows[0]}. "
                f"Return the same names and shapes for each batch."
            )


def rows_of(prediction: Any, num_rows: int | None = None) -> list[Row]:
    """One row for each sample of a batch.

    A tensor or an array is split along its first dimension. A list has an entry for
    each sample. A mapping has a column in each of its values; one that is a single
    number or text counts for each sample.

    >>> rows_of({"id": [7, 8], "p": torch.tensor([[1., 0.], [0., 1.]]), "by": "me"})[1]
    {'id': 8, 'p': [0.0, 1.0], 'by': 'me'}
    >>> rows_of(torch.tensor([3, 4]))
    [{'prediction': 3}, {'prediction': 4}]

    Args:
        prediction: what `predict_step` has returned.
        num_rows: the samples in the batch, if that is known.

    Raises:
        TrainkitError: it has no rows, or not as many as the batch.
    """
    named = (
        prediction if isinstance(prediction, Mapping) else {"prediction": prediction}
    )
    columns = {str(name): _plain(value) for name, value in named.items()}
    lengths = {len(each) for each in columns.values() if isinstance(each, list)} or {1}
    count = lengths.pop()
    if lengths or num_rows not in (None, count):
        raise _refused(
            f"columns of {sorted({count, *lengths})} rows, for a batch of "
            f"{num_rows or 'an unknown size'}"
        )
    return [
        {name: x[n] if isinstance(x, list) else x for name, x in columns.items()}
        for n in range(count)
    ]


def _plain(value: Any) -> Any:
    """A value of plain numbers, texts, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().tolist()
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, str | int | float | None):
        return value
    raise _refused(f"an object of {type(value).__name__}")


def _refused(received: str) -> TrainkitError:
    return TrainkitError(
        f"predict_step: must return a row for each sample of the batch, received "
        f"{received}. Return a tensor or a list with one entry for each sample, or a "
        f"dict of such columns."
    )
