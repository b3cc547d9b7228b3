"""Each sample of a batch is one row."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from trainkit.cli.evaluate.rows import rows_of
from trainkit.errors import TrainkitError

Pair = namedtuple("Pair", ["a", "b"])
TWO = torch.tensor([1, 2])


@dataclass
class Output:
    a: Any
    b: Any


@pytest.mark.parametrize(
    ("prediction", "rows"),
    [
        (TWO, [{"prediction": 1}, {"prediction": 2}]),
        (np.array([1.5, 2.5]), [{"prediction": 1.5}, {"prediction": 2.5}]),
        (["one", "two"], [{"prediction": "one"}, {"prediction": "two"}]),
        ([TWO, TWO[:1]], [{"prediction": [1, 2]}, {"prediction": [1]}]),
        ([{"a": TWO}, {"b": 3}], [{"a": [1, 2]}, {"b": 3}]),
        ((TWO, ["x", "y"]), [
            {"prediction_0": 1, "prediction_1": "x"},
            {"prediction_0": 2, "prediction_1": "y"},
        ]),
        (Pair(TWO, TWO), [{"a": 1, "b": 1}, {"a": 2, "b": 2}]),
        (Output(TWO, None), [{"a": 1, "b": None}, {"a": 2, "b": None}]),
        ({"a": TWO, "b": torch.tensor(7)}, [{"a": 1, "b": 7}, {"a": 2, "b": 7}]),
        ({"a": {"b": TWO, "c": 0}}, [{"a.b": 1, "a.c": 0}, {"a.b": 2, "a.c": 0}]),
        ({"a": torch.eye(2, dtype=torch.bfloat16)}, [{"a": [1, 0]}, {"a": [0, 1]}]),
    ],
)  # fmt: skip
def test_of_what_predict_step_may_return(prediction: Any, rows: Any) -> None:
    assert rows_of(prediction) == rows
    assert rows_of(prediction, 2) == rows
    with pytest.raises(TrainkitError, match="received 2 for a batch of 3"):
        rows_of(prediction, 3)


@pytest.mark.parametrize(
    ("prediction", "text"),
    [
        ({"a": TWO, "b": [1, 2, 3]}, r"columns of \{'a': 2, 'b': 3\} rows"),
        (torch.tensor(1.0), "1 for a batch of 2"),
        ([object()], "an object of object"),
        ({"a": {1, 2}}, "an object of set"),
    ],
)
def test_what_has_no_rows_is_refused(prediction: Any, text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        rows_of(prediction, 2)
