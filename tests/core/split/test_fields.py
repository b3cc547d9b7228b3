"""Any nesting is cut row by row, and put together in the same types."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.core.split.common import NESTED, X, Y
from trainkit import PerSample, TrainkitError, Uniform
from trainkit.core.nested import describe, tensors
from trainkit.core.split.cutting import Cutter
from trainkit.core.split.micro_batching import MicroBatching


def cutter(strategy: Any = None, size: int = 4, **options: Any) -> Cutter:
    return Cutter(MicroBatching(size=size, **options), strategy or Uniform())


@pytest.mark.parametrize("name", ["tensor", *NESTED])
def test_micro_batches_together_equal_the_batch(name: str) -> None:
    batch = NESTED[name][0] if name in NESTED else X
    shown = describe(batch, depth=9)
    micros = cutter().cut(batch)
    assert [micro.rows for micro in micros] == [[0, 1, 2], [3, 4, 5]]
    parts = [list(tensors(micro.batch)) for micro in micros]
    for whole, first, second in zip(tensors(batch), *parts, strict=True):
        assert torch.equal(torch.cat([first, second]), whole)
    assert describe(batch, depth=9) == shown  # itself not changed
    for micro in micros:
        assert type(micro.batch) is type(batch)
        assert getattr(micro.batch, "note", "kept") == "kept"
        assert describe(micro.batch, depth=9) == shown.replace("[6", "[3")


# ---- what is cut, and what is shared -------------------------------------------------

BOXES = [{"boxes": torch.randn(i + 1, 4)} for i in range(6)]
IMAGES = tuple(torch.randn(3, 8, 8 + i) for i in range(6))
CUT = [list("abcdef"), tuple({"id": i} for i in range(6)), BOXES, IMAGES]
SHARED = [["a", "b"], np.arange(9), np.zeros((2, 3)), torch.tensor(2.0), None, "abcdef"]


@pytest.mark.parametrize("strategy", [PerSample(size="x"), Uniform()], ids=str)
@pytest.mark.parametrize("value", [*CUT, *SHARED], ids=lambda v: describe(v)[:30])
def test_what_is_as_long_as_the_batch_is_cut(value: Any, strategy: Any) -> None:
    cut = cutter(strategy)
    first, second = (each.batch["v"] for each in cut.cut({"x": X, "v": value}))
    if any(value is each for each in CUT):
        assert type(first) is type(value)
        assert list(first + second) == list(value)
        assert cut.shared == []
    else:
        is_list = isinstance(value, list)
        assert first == second == value if is_list else first is second is value
        assert {field.path for field in cut.shared} <= {"v", "v.0", "v.1"}


def test_arrays_are_cut_and_are_the_rows_where_there_is_no_tensor() -> None:
    for batch in ({"a": np.arange(6)}, {"a": np.arange(6), "x": X}):
        micros = cutter().cut(batch)
        assert [m.batch["a"].tolist() for m in micros] == [[0, 1, 2], [3, 4, 5]]


def test_a_tensor_of_another_length_and_a_named_field_are_shared() -> None:
    batch = {"x": X, "table": {"deep": torch.randn(9, 3)}, "square": torch.randn(6, 6)}
    for cut, names in (
        (cutter(shared=("table", "square")), ["table", "square"]),
        (cutter(PerSample(size="x")), ["table.deep"]),
    ):
        for micro in cut.cut(batch):
            assert micro.batch["table"]["deep"] is batch["table"]["deep"]
            assert (micro.batch["square"] is batch["square"]) is ("square" in names)
        assert [path for path, _ in cut.shared] == names


def test_list_of_samples_is_cut_into_lists_where_it_is_the_size() -> None:
    samples = [torch.full((5,), float(i)) for i in range(7)]
    micros = cutter(PerSample(size=""), 3).cut(samples)
    assert [[int(x[0]) for x in m.batch] for m in micros] == [[0, 1, 2], [3, 4], [5, 6]]


@pytest.mark.parametrize(
    "make",
    [
        lambda n, number: {"0": [X[:n]] * number, "x": X[:n]},
        lambda n, number: ([{"a": X[:n]}] * number, Y[:n]),
    ],
    ids=["tensors", "records"],
)
def test_a_list_that_may_be_of_fields_or_of_rows(make: Any) -> None:
    """Two pictures with two boxes each look like two fields of two rows."""
    cut = cutter(size=1)
    cut.cut(make(1, 1))  # which says nothing
    with pytest.raises(TrainkitError, match="'0' is a list of 2 entries of 2 rows"):
        cut.cut(make(2, 2))
    cut.cut(make(6, 2))  # another size shows that they are fields
    for micro in cut.cut(make(2, 2)):
        assert [len(tensor) for tensor in tensors(micro.batch)] == [1, 1, 1]


def test_pair_of_matrices_is_cut_also_where_a_short_batch_looks_like_images() -> None:
    for rows in (5, 3):
        micros = cutter(PerSample(), 2).cut([torch.zeros(rows, 8, 8)] * 2)
        assert sum(len(micro.batch[0]) for micro in micros) == rows


# ---- what cannot be cut --------------------------------------------------------------


class Box:
    def __init__(self) -> None:
        self.x = X


class Graphs:
    """As a batch of torch_geometric."""

    def __init__(self) -> None:
        self._store = {"x": torch.zeros(9, 3)}


class Opaque:
    """As a batch of dgl, whose tensors nobody can see."""

    batch_size = 4


JAGGED = torch.nested.nested_tensor([X[0], X[:, 0]], layout=torch.jagged)


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ({"x": X, "t": X[:5]}, r"cannot tell the rows.*\[5, 6\].*t: float32\[5, 2\]"),
        ({"a": 1, "b": "text"}, r"no tensor with rows.*dict\(a: int, b: str\)"),
        (torch.tensor(1.0), r"no tensor with rows.*float32\[\]"),
        (None, r"no tensor with rows.*NoneType"),
        ([{"x": X}, {"x": X}], r"list of samples.*collate=your_collate_fn"),
        ([torch.randn(3, 8, 8) for _ in range(4)], r"no tensor with.*list of samples"),
        ([{"ids": [1, 2]}, {"ids": [3]}], r"list of samples.*collate="),
        ([{"x": np.zeros(6)}] * 2, r"no tensor with rows.*list of samples"),
        ([torch.zeros(3), torch.zeros(5)], r"cannot tell the rows.*\[3, 5\].*collate="),
        ((IMAGES, BOXES), r"no tensor with rows.*list of samples"),
        (Graphs(), r"the batch is a Graphs, whose rows.*x: float32.*collate="),
        ({"g": Graphs()}, r"field 'g' is a Graphs.*collate=Batch.from_data_list"),
        (Opaque(), r"the batch is a Opaque, whose rows cannot.*collate="),
        ((X, Opaque()), r"field '1' is a Opaque, whose rows cannot"),
        ((X, Box()), r"field '1' is a Box, whose rows cannot.*tuple\(float32"),
        ((X, X.to_sparse()), r"field '1' is a torch.sparse_coo tensor.*shared="),
        ((JAGGED, X[:2]), r"field '0' is a nested tensor"),
    ],
)
def test_batch_that_cannot_be_cut_is_refused(batch: Any, text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        cutter().cut(batch)
