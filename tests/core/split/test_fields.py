"""Any nesting is cut row by row, and put together in the same types."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from trainkit import PerSample, TrainkitError, Uniform
from trainkit.core.nested import describe, tensors
from trainkit.core.split.cutting import Cutter
from trainkit.core.split.micro_batching import MicroBatching

X = torch.arange(12.0).view(6, 2)
Y = torch.arange(6)


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor
    y: Tensor
    note: str = "n"


@dataclasses.dataclass
class Checked:
    x: Tensor
    total: int = dataclasses.field(init=False, default=6)


class Encoding(UserDict):  # as BatchEncoding of transformers is
    """A mapping that holds its data in an attribute, and more beside it."""

    def __init__(self, data: Any = None, *, note: str = "") -> None:
        super().__init__(data)
        self.note = note


OldPair = namedtuple("OldPair", ["x", "y"])

BATCHES: dict[str, Any] = {
    "tensor": X,
    "dict": {"x": X, "y": Y},
    "ordered dict": OrderedDict(y=Y, x=X),
    "default dict": defaultdict(list, x=X, y=Y),
    "user dict": Encoding({"x": X, "y": Y}, note="kept"),
    "read-only mapping": MappingProxyType({"x": X, "y": Y}),
    "tuple": (X, Y),
    "list": [X, Y],
    "named tuple": Pair(X, Y),
    "old named tuple": OldPair(X, Y),
    "frozen dataclass": Frozen(X, Y),
    "dataclass with its own fields": Checked(X),
    "int keys": {0: X, 1: Y},
    "nested": {"a": [Pair(X, Y), {"b": (Frozen(X, Y), X)}], "c": {"n": 3}, "y": Y},
}


@pytest.mark.parametrize("name", BATCHES)
def test_micro_batches_together_equal_the_batch(name: str) -> None:
    batch = BATCHES[name]
    shown = describe(batch, depth=9)
    micros = Cutter(MicroBatching(size=4), Uniform()).cut(batch)
    assert [micro.rows for micro in micros] == [[0, 1, 2], [3, 4, 5]]
    assert all(type(micro.batch) is type(batch) for micro in micros)
    parts = [list(tensors(micro.batch)) for micro in micros]
    for whole, first, second in zip(tensors(batch), *parts, strict=True):
        assert torch.equal(torch.cat([first, second]), whole)
    assert describe(batch, depth=9) == shown  # itself not changed
    assert describe(micros[0].batch, depth=9) == shown.replace("[6", "[3")


def test_micro_batches_of_user_dict_keep_what_is_beside_the_data() -> None:
    batch = Encoding({"x": X}, note="kept")
    first, second = Cutter(MicroBatching(size=3), Uniform()).cut(batch)
    assert first.batch.note == "kept"
    first.batch["x"] = None
    assert batch["x"] is X
    assert torch.equal(second.batch["x"], X[3:])


def test_micro_batch_of_frozen_dataclass_keeps_its_other_fields() -> None:
    first, _ = Cutter(MicroBatching(size=3), Uniform()).cut(Frozen(X, Y, "kept"))
    assert first.batch.note == "kept"


def test_rows_are_views_where_no_length_sorts_them() -> None:
    for micro in Cutter(MicroBatching(size=4), Uniform()).cut((X, Y)):
        assert micro.batch[0].untyped_storage().data_ptr() == (
            X.untyped_storage().data_ptr()
        )


def test_lists_of_as_many_entries_as_rows_are_cut_and_others_shared() -> None:
    batch = {
        "x": X,
        "names": list("abcdef"),
        "infos": tuple({"id": i} for i in range(6)),
        "array": np.arange(12).reshape(6, 2),
        "labels": ["cat", "dog"],
        "scale": torch.tensor(2.0),
        "none": None,
        "number": np.float64(3.0),
        "empty": [],
        "text": "abcdef",
    }
    first, second = Cutter(MicroBatching(size=4), Uniform()).cut(batch)
    assert first.batch["names"] == ["a", "b", "c"]
    assert second.batch["infos"] == ({"id": 3}, {"id": 4}, {"id": 5})
    assert second.batch["array"].tolist() == [[6, 7], [8, 9], [10, 11]]
    for micro in (first, second):
        for name in ("labels", "scale", "none", "number", "empty", "text"):
            assert micro.batch[name] == batch[name]


def test_targets_of_detection_are_cut_row_by_row() -> None:
    boxes = [torch.randn(i + 1, 4) for i in range(4)]
    batch = (torch.randn(4, 3, 8, 8), [{"boxes": each} for each in boxes])
    first, second = Cutter(MicroBatching(size=2), PerSample(size=0)).cut(batch)
    assert [t["boxes"] for t in first.batch[1] + second.batch[1]] == boxes
    # Images of different sizes come as a tuple of tensors.
    batch = (tuple(torch.randn(3, 8, 8 + i) for i in range(4)), batch[1])
    first, second = Cutter(MicroBatching(size=2), PerSample(size=1)).cut(batch)
    assert [image.shape[2] for image in second.batch[0]] == [10, 11]
    assert [t["boxes"] for t in first.batch[1] + second.batch[1]] == boxes


def test_two_tensors_in_a_list_stay_fields_in_a_batch_of_two_rows() -> None:
    cutter = Cutter(MicroBatching(size=1), PerSample(size="x"))
    cutter.cut({"x": X, "states": [X, X]})
    batch = {"x": X[:2], "states": [X[:2], X[:2]]}
    first, _ = cutter.cut(batch)
    assert [state.shape for state in first.batch["states"]] == [(1, 2), (1, 2)]


def test_shared_fields_are_handed_whole() -> None:
    table = torch.randn(9, 3)
    square = torch.randn(6, 6)
    batch = {"x": X, "table": {"deep": table}, "square": square}
    options = MicroBatching(size=4, shared=("table", "square"))
    for micro in Cutter(options, Uniform()).cut(batch):
        assert micro.batch["table"]["deep"] is table
        assert micro.batch["square"] is square


class Box:
    def __init__(self) -> None:
        self.x = X


class Graphs:
    """As a batch of torch_geometric."""

    def __init__(self, num_nodes: int, num_graphs: int) -> None:
        self._store = {"x": torch.zeros(num_nodes, 3)}
        self.num_graphs = num_graphs


class Opaque:
    """As a batch of dgl, whose tensors nobody can see."""

    batch_size = 4


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ({"x": X, "t": X[:5]}, r"cannot tell the rows.*\[5, 6\].*t: float32\[5, 2\]"),
        ({"a": 1, "b": "text"}, r"no tensor with rows.*dict\(a: int, b: str\)"),
        ((X, Box()), r"field '1' is a Box, which holds tensors.*tuple\(float32"),
        (torch.tensor(1.0), r"no tensor with rows.*float32\[\]"),
        (None, r"no tensor with rows.*NoneType"),
        ([{"x": X}, {"x": X}], r"list of samples.*collate=your_collate_fn"),
        ([torch.randn(3, 8, 8) for _ in range(4)], r"list of samples.*collate="),
        ([{"ids": [1, 2]}, {"ids": [3]}], r"list of samples.*collate="),
        ([torch.zeros(3), torch.zeros(5)], r"cannot tell the rows.*\[3, 5\].*collate="),
        (
            Graphs(9, 4),
            r"the batch is a Graphs, which holds tensors.*x: float32",
        ),
        ({"g": Graphs(9, 4)}, r"field 'g' is a Graphs.*collate=Batch.from_data_list"),
        (Opaque(), r"the batch is a Opaque, which counts samples of its own.*collate="),
        ((X, Opaque()), r"field '1' is a Opaque, which counts samples of its own"),
        ((X, X.to_sparse()), r"field '1' is a torch.sparse_coo tensor.*shared="),
    ],
)
def test_batch_that_cannot_be_cut_is_refused(batch: Any, text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        Cutter(MicroBatching(size=4), Uniform()).cut(batch)


def test_nested_tensor_is_refused() -> None:
    jagged = torch.nested.nested_tensor(
        [torch.zeros(2), torch.zeros(3)], layout=torch.jagged
    )
    with pytest.raises(TrainkitError, match=r"field '0' is a nested tensor"):
        Cutter(MicroBatching(size=1), Uniform()).cut((jagged, X[:2]))


def test_arrays_and_lists_of_another_length_are_shared() -> None:
    """And do not count as rows."""
    batch = {
        "x": X,
        "index": np.arange(9),
        "names": ["a", "b"],
        "grid": np.zeros((2, 3)),
        "of rows": np.arange(6),
    }
    micros = Cutter(MicroBatching(size=4), Uniform()).cut(batch)
    for micro in micros:
        for name in ("index", "names", "grid"):
            assert micro.batch[name] is batch[name] or micro.batch[name] == batch[name]
    assert [m.batch["of rows"].tolist() for m in micros] == [[0, 1, 2], [3, 4, 5]]
    # Without a tensor, arrays are the rows.
    micros = Cutter(MicroBatching(size=4), Uniform()).cut({"a": np.arange(6)})
    assert [m.batch["a"].tolist() for m in micros] == [[0, 1, 2], [3, 4, 5]]


def test_list_of_records_of_fields_is_no_list_of_rows() -> None:
    def batch(rows: int) -> Any:
        return ([{"a": X[:rows]}, {"a": X[:rows]}], Y[:rows])

    cutter = Cutter(MicroBatching(size=2), PerSample())
    for rows in (6, 4, 2):  # then, two rows are no two records
        micros = cutter.cut(batch(rows))
        for micro in micros:
            assert [r["a"].shape for r in micro.batch[0]] == [(2, 2), (2, 2)]
            assert PerSample().weight(micro.batch) == 2
    with pytest.raises(TrainkitError, match="'0' is a list of 2 entries of 2 rows"):
        Cutter(MicroBatching(size=1), PerSample()).cut(batch(2))


def test_list_of_samples_is_cut_into_lists_where_it_is_the_size() -> None:
    samples = [torch.full((5,), float(i)) for i in range(7)]
    strategy = PerSample(size="")
    micros = Cutter(MicroBatching(size=3), strategy).cut(samples)
    assert [strategy.weight(micro.batch) for micro in micros] == [3, 2, 2]
    assert [float(x[0]) for m in micros for x in m.batch] == list(range(7))


def test_pair_of_matrices_is_cut_also_where_a_short_batch_looks_like_images() -> None:
    cutter = Cutter(MicroBatching(size=2), PerSample())
    for rows in (5, 3):
        micros = cutter.cut([torch.zeros(rows, 8, 8)] * 2)
        assert sum(len(micro.batch[0]) for micro in micros) == rows


def test_a_tensor_of_another_length_is_shared() -> None:
    batch = {"x": X, "table": torch.zeros(9, 3)}
    cutter = Cutter(MicroBatching(size=4), PerSample(size="x"))
    for micro in cutter.cut(batch):
        assert micro.batch["table"] is batch["table"]
    assert [path for path, _ in cutter.shared] == ["table"]
