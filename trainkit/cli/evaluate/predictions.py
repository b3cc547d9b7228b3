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


class Predictions(BasePredictionWriter):
    """Writes each batch's rows to `predictions.csv` as they come, and keeps none.

    A list or a dict stands in its cell as JSON. The file gets its name when it is
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
        self._columns: list[str] = []
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
        for row in rows:
            self._write(row)

    def on_predict_end(self, trainer: Any, pl_module: Any) -> None:
        if self._file is not None:
            self._file.close()
            self.path = self.folder / "predictions.csv"
            os.replace(self._file.name, self.path)
            self._file = None

    def close(self) -> None:
        """Remove the file of a prediction that did not end."""
        if self._file is not None:
            self._file.close()
            Path(self._file.name).unlink(missing_ok=True)
            self._file = None

    def _write(self, row: dict[str, Any]) -> None:
        if self._file is None:
            unfinished = self.folder / f".predictions.{os.getpid()}"
            self._file = unfinished.open("w", encoding="utf-8", newline="")
            self._columns = list(row)
            csv.writer(self._file).writerow(self._columns)
        if list(row) != self._columns:
            raise TrainkitError(
                f"predict_step: all batches must have the columns of the first one, "
                f"{self._columns}, received {row}. Return the same names for each."
            )
        cells = [
            json.dumps(value, default=str) if isinstance(value, list | dict) else value
            for value in row.values()
        ]
        csv.writer(self._file).writerow(cells)
        self.num_rows += 1


def rows_of(prediction: Any, num_rows: int | None = None) -> list[dict[str, Any]]:
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
