"""Each sample of a batch is one row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from trainkit.cli.evaluate.predictions import rows_of
from trainkit.errors import TrainkitError

TWO = torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("prediction", "rows"),
    [
        (TWO, [{"prediction": 1}, {"prediction": 2}]),
        (np.array([1.5, 2.5]), [{"prediction": 1.5}, {"prediction": 2.5}]),
        (["one", "two"], [{"prediction": "one"}, {"prediction": "two"}]),
        ([TWO, TWO[:1]], [{"prediction": [1, 2]}, {"prediction": [1]}]),
        ({"a": TWO, "b": torch.tensor(7)}, [{"a": 1, "b": 7}, {"a": 2, "b": 7}]),
        ({"a": torch.eye(2, dtype=torch.bfloat16)}, [{"a": [1, 0]}, {"a": [0, 1]}]),
    ],
)  # fmt: skip
def test_of_what_predict_step_may_return(prediction: Any, rows: Any) -> None:
    assert rows_of(prediction) == rows
    assert rows_of(prediction, 2) == rows
    with pytest.raises(TrainkitError, match=r"columns of \[2\] rows, for a batch of 3"):
        rows_of(prediction, 3)


@pytest.mark.parametrize(
    ("prediction", "text"),
    [
        ({"a": TWO, "b": [1, 2, 3]}, r"columns of \[2, 3\] rows"),
        (torch.tensor(1.0), r"columns of \[1\] rows, for a batch of 2"),
        ([object()], "an object of object"),
        ({"a": {1, 2}}, "an object of set"),
        ((TWO, TWO), "an object of tuple"),
    ],
)
def test_what_has_no_rows_is_refused(prediction: Any, text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        rows_of(prediction, 2)
