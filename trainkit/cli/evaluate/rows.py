"""The rows of a batch's predictions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from trainkit.errors import TrainkitError

Row = dict[str, Any]

NAME = "prediction"
"""The column of predictions that have no name."""

_PLAIN = (str, int, float, bool, type(None))


def rows_of(prediction: Any, num_rows: int | None = None) -> list[Row]:
    """One row for each sample of a batch.

    A tensor or an array is split along its first dimension. A list has an entry for
    each sample. A mapping, a dataclass or a tuple has a column in each of its values;
    one that is a single number or text counts for each sample.

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
    columns = {name: _plain(value) for name, value in _columns(prediction).items()}
    lengths = {name: len(x) for name, x in columns.items() if isinstance(x, list)}
    if len(set(lengths.values())) > 1:
        raise _refused(f"columns of {lengths} rows")
    found = next(iter(lengths.values()), 1)
    if num_rows not in (None, found):
        raise _refused(f"{found} for a batch of {num_rows}")
    if isinstance(prediction, list):
        samples: list[Any] = columns[NAME]
        if all(isinstance(each, dict) for each in samples):
            return samples
    return [
        {name: x[n] if isinstance(x, list) else x for name, x in columns.items()}
        for n in range(found)
    ]


def _columns(value: Any) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        found = {}
        for name, each in value.items():
            inner = _columns(each).items() if isinstance(each, Mapping) else None
            if inner is None:
                found[str(name)] = each
            else:
                found.update({f"{name}.{key}": x for key, x in inner})
        return found
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        names = getattr(value, "_fields", None)
        names = names or [f"{NAME}_{n}" for n in range(len(value))]
        return dict(zip(names, value, strict=True))
    return {NAME: value}


def _plain(value: Any) -> Any:
    """A value of plain numbers, texts, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().tolist()
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, _PLAIN):
        return value
    raise _refused(f"an object of {type(value).__name__}")


def _refused(received: str) -> TrainkitError:
    return TrainkitError(
        f"predict_step: must return a row for each sample of the batch, received "
        f"{received}. Return a tensor or a list with one entry for each sample, or a "
        f"dict of such columns."
    )
