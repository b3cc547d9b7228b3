"""Finding things in nested batches."""

from __future__ import annotations

import dataclasses
from collections import deque, namedtuple
from typing import Any, NamedTuple

import pytest
import torch
from transformers import BatchEncoding

from trainkit import PerSample, PerToken, TrainkitError
from trainkit.core.batches import leading_dimension
from trainkit.core.nested import describe, lookup, tensors

IDS = torch.arange(12).view(3, 4)
LABELS = torch.tensor([[1, 2, -100, -100], [3, -100, -100, -100], [4, 5, 6, 7]])


class Pair(NamedTuple):
    ids: torch.Tensor
    labels: torch.Tensor


@dataclasses.dataclass
class Example:
    ids: torch.Tensor
    labels: torch.Tensor
    note: str = "x"


@dataclasses.dataclass
class Nested:
    inner: Any


OldPair = namedtuple("OldPair", ["ids", "labels"])

BATCHES: dict[str, tuple[Any, Any]] = {
    "dict": ({"ids": IDS, "labels": LABELS}, "labels"),
    "tuple": ((IDS, LABELS), 1),
    "list": ([IDS, LABELS], 1),
    "negative index": ((IDS, LABELS), -1),
    "named tuple": (Pair(IDS, LABELS), "labels"),
    "old named tuple": (OldPair(IDS, LABELS), "labels"),
    "named tuple by index": (Pair(IDS, LABELS), 1),
    "dataclass": (Example(IDS, LABELS), "labels"),
    "BatchEncoding": (BatchEncoding({"ids": IDS, "labels": LABELS}), "labels"),
    "tuple by string": ((IDS, LABELS), "1"),
    "dict of dict": ({"x": IDS, "targets": {"labels": LABELS}}, "targets.labels"),
    "tuple of dict": ((IDS, {"labels": LABELS}), "1.labels"),
    "dict of tuple": ({"x": IDS, "y": (IDS, LABELS)}, "y.1"),
    "dataclass of named tuple": (Nested(Pair(IDS, LABELS)), "inner.labels"),
    "int keys": ({0: IDS, 1: LABELS}, 1),
    "int keys by string": ({0: IDS, 1: LABELS}, "1"),
    "attribute": (type("Box", (), {"labels": LABELS})(), "labels"),
}


@pytest.mark.parametrize("name", BATCHES)
def test_weight_of_nested_batch_equals_that_of_its_tensors(name: str) -> None:
    batch, path = BATCHES[name]
    assert lookup(batch, path) is LABELS
    assert PerToken(labels=path).weight(batch) == 7
    assert PerSample(size=path).weight(batch) == 3
    if name != "attribute":  # nothing can look into an unknown class
        assert PerSample().weight(batch) == 3
        assert {t.shape[0] for t in tensors(batch)} == {3}


def test_leading_dimension_looks_past_numbers_and_strings() -> None:
    batch = {"x": IDS, "scale": torch.tensor(2.0), "names": ["a", "b"], "n": 7, "m": {}}
    assert leading_dimension(batch) == 3
    assert leading_dimension(IDS) == 3


def test_leading_dimension_of_an_empty_batch_is_zero() -> None:
    assert leading_dimension({"x": torch.zeros(0, 5)}) == 0


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ({"x": IDS, "y": torch.zeros(5)}, r"PerSample: cannot tell .* has \[3, 5\]"),
        ({"x": 3, "y": "abc"}, r"has no tensor with a length.*dict\(x: int, y: str\)"),
        (torch.tensor(1.0), r"no tensor with a length.*float32\[\]"),
        (None, r"no tensor with a length.*NoneType"),
    ],
)
def test_batch_without_a_size_is_refused(batch: Any, text: str) -> None:
    with pytest.raises(TrainkitError, match=text) as error:
        PerSample().weight(batch)
    assert "PerSample(size='path.to.tensor')" in str(error.value)


@pytest.mark.parametrize(
    ("batch", "path", "text"),
    [
        ({"x": IDS}, "labels", r"path 'labels': .* nothing at 'labels'.*x: int64\[3"),
        ({"y": {"a": IDS}}, "y.labels", r"path 'y.labels': .* nothing at 'labels'"),
        ((IDS,), 1, r"path 1: .* nothing at 1.*tuple\(int64\[3, 4\]\)"),
        ((IDS,), "labels", r"nothing at 'labels'"),
        (IDS, 1, r"path 1: .*int64\[3, 4\]"),
        (None, "labels", r"path 'labels'.*NoneType"),
        ({"labels": [1, 2]}, "labels", r"PerToken labels 'labels'.*list\(int, int\)"),
        ({"x": 1}, "keys", r"PerToken labels 'keys': must be the path of a tensor"),
    ],
)
def test_batch_without_labels_is_refused(batch: Any, path: Any, text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        PerToken(labels=path).weight(batch)


def test_describe_equals_the_structure() -> None:
    assert describe({"x": torch.zeros(2, 3), "y": [1, "a"]}) == (
        "dict(x: float32[2, 3], y: list(int, str))"
    )
    assert describe(Pair(IDS, LABELS)) == "Pair(ids: int64[3, 4], labels: int64[3, 4])"
    assert (
        describe({"a": {"b": {"c": {"d": 1}}}})
        == "dict(a: dict(b: dict(c: dict(...))))"
    )
    assert describe(list(range(10))) == "list(" + "int, " * 8 + "... 2 more)"
    assert describe(deque(range(10))) == "deque(" + "int, " * 8 + "... 2 more)"
    rows = [{"x": torch.zeros(n)} for n in range(5)]
    shown = "dict(x: float32[0]), dict(x: float32[1])"
    assert describe(rows) == f"list({shown}, ... 3 more)"
    assert describe(rows[:2]) == f"list({shown})"
    assert describe([*rows[:2], IDS]) == f"list({shown}, int64[3, 4])"
