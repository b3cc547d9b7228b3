"""A count of the whole batch that every micro-batch gets whole is named."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trainkit import PerSample
from trainkit.core.split.cutting import Cutter
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.split.whole_counts import announce_whole_counts
from trainkit.errors import TrainkitError

X = torch.arange(12.0).view(6, 2)


@dataclasses.dataclass
class Counted:
    x: Tensor

    def __post_init__(self) -> None:
        self.total = len(self.x)


class Encoding(UserDict):
    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self.total = len(data["x"])


@dataclasses.dataclass
class Computed:
    x: Tensor

    @property
    def total(self) -> int:
        return len(self.x)


def is_named(batch: Any, *, shared: list[Any] | None = None) -> bool:
    shared = shared or []
    options = MicroBatching(size=4, shared=shared)
    part = Cutter(options, PerSample()).cut(batch)[0].batch
    return announce_whole_counts(batch, part, {6: "rows", 17: "labels"}, shared)


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ({"x": X, "n": 6}, "field 'n' is 6.* 6 rows.*shared=\\['n'\\]"),
        ({"x": X, "n": torch.tensor(6)}, "field 'n' is 6"),
        ({"x": X, "n": torch.tensor(17.0)}, "field 'n' is 17.* 17 labels"),
        ({"x": X, "n": np.int64(6)}, "field 'n' is 6"),
        ({"x": X, "n": 6.0}, "field 'n' is 6"),
        ({"x": X, "meta": {"n": (6,)}}, "field 'meta.n.0' is 6"),
        ({"x": X, "inv": 1 / 6}, "field 'inv' is 1 / 6.* multiplied by it"),
        ({"x": X, "inv": torch.tensor(1 / 17)}, "field 'inv' is 1 / 17.* 17 labels"),
        ((X, 6), "field '1' is 6"),
        (Counted(X), "field 'total' is 6"),
        ({"in": Counted(X)}, "field 'in.total' is 6"),
        (Encoding({"x": X}), "field 'total' is 6"),
    ],
)
def test_count_of_the_whole_batch_is_named(batch: Any, text: str) -> None:
    with pytest.warns(UserWarning, match=text):
        assert is_named(batch)


@pytest.mark.parametrize(
    "batch",
    [
        {"x": X, "n": 5},
        {"x": X, "n": True},
        {"x": X, "n": 6.5},
        {"x": X, "scale": 0.1},
        {"x": X, "scale": 0.1667},
        {"x": X, "scale": 1e-320},
        {"x": X, "scale": float("inf")},
        {"x": X, "ids": list(range(1, 7))},
        {"x": X, "infos": tuple({"n": 6} for _ in range(6))},
        {"x": X, "y": torch.full((6,), 6)},
        Computed(X),
    ],
)
def test_other_numbers_are_not_named(batch: Any) -> None:
    assert not is_named(batch)


def test_number_that_is_shared_by_name_is_not_named() -> None:
    assert not is_named({"x": X, "n": 6}, shared=["n"])
    assert not is_named((X, 6), shared=[1])
    assert not is_named({"x": X, "meta": {"n": 6}}, shared=["meta.n"])


def test_zero_and_one_are_not_named() -> None:
    batch = {"x": X[:2], "first": 1, "none": 0}
    part = Cutter(MicroBatching(size=1), PerSample()).cut(batch)[0].batch
    assert not announce_whole_counts(batch, part, {1: "rows", 0: "labels"}, ())


@pytest.mark.parametrize("more", [{}, {"attention_mask": torch.ones(6, 3)}])
def test_refused_tensor_of_one_number_is_not_to_be_shared_if_it_counts(
    more: dict[str, Tensor],
) -> None:
    batch = {"x": X, "n": torch.tensor([6]), **more}
    with pytest.raises(TrainkitError, match="shared=.* A count that the loss is"):
        Cutter(MicroBatching(size=4), PerSample()).cut(batch)
    with pytest.raises(TrainkitError) as other:
        Cutter(MicroBatching(size=4), PerSample()).cut({**batch, "n": torch.ones(2)})
    assert "A count" not in str(other.value)
