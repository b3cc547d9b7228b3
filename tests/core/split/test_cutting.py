"""Each row is in one micro-batch, the first is the largest, the step is the same; any
nesting is cut row by row, and put together in the same types."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.core.split.common import DISTRIBUTIONS, NESTED, Side, X, Y, ragged, window
from tests.helpers import deviation, gradients
from trainkit import PackCollate, PerSample, PerToken, TrainkitError, Uniform
from trainkit.core.nested import describe, tensors
from trainkit.core.split.cutting import Cutter, Limit, MicroBatch
from trainkit.core.split.micro_batching import MicroBatching


def rows_of(micros: list[MicroBatch]) -> list[list[int]]:
    return [micro.rows for micro in micros]


@pytest.mark.parametrize(
    ("num_rows", "size", "sizes"),
    [
        (10, 4, [4, 3, 3]),
        (8, 4, [4, 4]),
        (3, 4, [3]),
        (1, 1, [1]),
        (5, 1, [1] * 5),
        (0, 4, [0]),
    ],
)
def test_rows_of_one_length_are_cut_evenly_in_their_order(
    num_rows: int, size: int, sizes: list[int]
) -> None:
    x = torch.arange(float(num_rows))
    micros = Cutter(MicroBatching(size=size), Uniform()).cut(x)
    for found in ([len(m.rows) for m in micros], [m.padded for m in micros]):
        assert found == sizes == [m.real for m in micros]
    assert torch.equal(torch.cat([micro.batch for micro in micros]), x)
    memory = range(x.data_ptr(), x.data_ptr() + 99)
    assert all(micro.batch.data_ptr() in memory for micro in micros)
    if num_rows == 10:
        for options in (MicroBatching(size=4), MicroBatching(tokens=30)):
            alike = Cutter(options, PerToken()).cut(ragged([7] * 10))
            assert rows_of(alike) == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize(
    "options", [{"tokens": 2048}, {"size": 8}, {"tokens": 2048, "size": 5}, {}], ids=str
)
def test_each_row_is_in_one_and_the_largest_is_first(name: str, options: Any) -> None:
    lengths = window(name, random.Random(4))
    batch = ragged(lengths, side="left")
    micros = Cutter(MicroBatching(**options), PerToken()).cut(batch)  # type: ignore[arg-type]
    assert sorted(sum(rows_of(micros), [])) == list(range(64))
    sizes = [micro.padded for micro in micros]
    assert sizes == sorted(sizes, reverse=True)
    for micro in micros:
        longest = max(lengths[row] for row in micro.rows)
        assert micro.rows == sorted(micro.rows)
        assert micro.padded == len(micro.rows) * longest
        assert micro.real == sum(lengths[row] for row in micro.rows)
        assert len(micro.rows) <= options.get("size", 64)
        assert micro.padded <= options.get("tokens", 10**9)
        for field, whole in batch.items():
            assert torch.equal(micro.batch[field], whole[micro.rows, -longest:])
            assert micro.batch[field].is_contiguous()


def test_limit_replaces_that_of_the_options() -> None:
    cutter, batch = Cutter(MicroBatching(), PerToken()), ragged([9, 9, 9, 9, 2, 2])
    limits = [None, Limit(tokens=18), Limit(size=1), Limit(size=1, tokens=10**6)]
    assert [len(cutter.cut(batch, limit)) for limit in limits] == [1, 3, 6, 6]


def test_documents_are_spread_over_micro_batches_of_a_size() -> None:
    """With about as many tokens in each, as memory holds the largest of them."""
    batch = PackCollate()([{"input_ids": [1] * n} for n in (9, 8, 4, 3, 3, 2)])
    micros = Cutter(MicroBatching(size=3), PerToken()).cut(batch)
    assert [micro.real for micro in micros] == [15, 14]


def test_row_over_the_budget_is_alone() -> None:
    cutter = Cutter(MicroBatching(tokens=10), PerToken())
    first, *rest = cutter.cut(ragged([3, 50, 3]))
    assert (first.rows, first.padded, rows_of(rest)) == ([1], 50, [[0, 2]])


def test_padded_is_what_the_uncut_batch_computes() -> None:
    cutter, batch = Cutter(MicroBatching(), PerToken()), ragged([3, 5, 2])
    rows = cutter.read(batch).rows
    assert (rows.num_rows, rows.padded, len(rows.groups)) == (3, 15, 1)
    assert len(cutter.cut(ragged([4] * 6))[0].rows) == 6  # another batch
    assert [m.padded for m in cutter.cut(batch)] == [15]
    plain = Cutter(MicroBatching(), PerSample())
    rows = plain.read(torch.zeros(4, 9)).rows
    assert (rows.num_rows, rows.padded, len(rows.groups)) == (4, 4, 0)


def test_empty_batch_is_one_micro_batch_without_rows() -> None:
    batch = {"ids": torch.zeros(0, 5), "attention_mask": torch.zeros(0, 5)}
    (micro,) = Cutter(MicroBatching(tokens=9), PerToken()).cut(batch)
    assert (micro.rows, micro.padded, micro.real) == ([], 0, 0)
    assert micro.batch["ids"].shape == (0, 5)


def test_tokens_without_lengths_are_refused_with_the_structure() -> None:
    text = r"tokens=64: .*nothing in the batch tells them: dict\(x: float32\[4, 9\]\)"
    with pytest.raises(TrainkitError, match=text):
        Cutter(MicroBatching(tokens=64), PerSample()).cut({"x": torch.zeros(4, 9)})


# ---- the step ------------------------------------------------------------------------


def step(batches: list[Any]) -> tuple[float, Tensor]:
    """Loss and gradient of a window weighed by its tokens, of a net in which a token
    sees all of its row that the mask does not hide."""
    torch.manual_seed(0)
    net, losses = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9)).double(), []
    total = sum(int(PerToken().weight(batch)) for batch in batches)
    for batch in batches:
        hidden, mask = net[0](batch["ids"]), batch["attention_mask"].unsqueeze(2)
        scores = (hidden @ hidden.mT).masked_fill(mask.mT == 0, -torch.inf)
        logits = net[1](scores.softmax(-1) @ hidden).flatten(0, 1)
        targets = batch["labels"].view(-1)  # needs contiguous micro-batches
        losses.append(F.cross_entropy(logits, targets, reduction="sum") / total)
        losses[-1].backward()
    return sum(loss.item() for loss in losses), gradients(net)


@pytest.mark.parametrize("side", ["right", "left", "mixed"])
@pytest.mark.parametrize(
    "options",
    [{"tokens": 24}, {"tokens": 24, "size": 2}, {"size": 3}, {"size": 1}, {}],
    ids=str,
)
def test_step_of_cut_window_equals_that_of_the_whole(side: Side, options: Any) -> None:
    batch = ragged([9, 2, 5, 14, 1, 7, 3, 3, 12, 6], side=side)
    micros = Cutter(MicroBatching(**options), PerToken()).cut(batch)  # type: ignore[arg-type]
    loss, gradient = step([micro.batch for micro in micros])
    whole_loss, whole = step([batch])
    assert loss == pytest.approx(whole_loss, rel=1e-12)
    assert deviation(gradient, whole, torch.zeros_like(whole)) < 1e-9
    if len(micros) > 1:
        # Negative control: a mean of the micro-batches' means is another gradient.
        means = [step([micro.batch])[1] / len(micros) for micro in micros]
        assert deviation(sum(means), whole, torch.zeros_like(whole)) > 1e-3


# ---- fields --------------------------------------------------------------------------


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
    cut, batch = cutter(strategy), {"x": X, "v": value}
    first, second = (each.batch["v"] for each in cut.cut(batch))
    if any(value is each for each in CUT):
        assert type(first) is type(value)
        assert list(first + second) == list(value)
        assert cut.read(batch).shared == []
    else:
        is_list = isinstance(value, list)
        assert first == second == value if is_list else first is second is value
        assert {field.path for field in cut.read(batch).shared} <= {"v", "v.0", "v.1"}


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
        assert [path for path, _ in cut.read(batch).shared] == names


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


def made(name: str, **attributes: Any) -> Any:
    """An object of a class that nobody knows."""
    found = type(name, (), {})()
    vars(found).update(attributes)
    return found


BOX, HIDDEN = made("Box", x=X), made("Hidden", _x=X)
GRAPHS = made("Graphs", _store={"x": torch.zeros(9, 3)})  # as torch_geometric's batch
OPAQUE = made("Opaque", batch_size=4)  # as dgl's, whose tensors nobody can see
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
        (GRAPHS, r"the batch is a Graphs, whose rows.*x: float32.*collate="),
        ({"g": GRAPHS}, r"field 'g' is a Graphs.*collate=Batch.from_data_list"),
        (OPAQUE, r"the batch is a Opaque, whose rows cannot.*collate="),
        ((X, OPAQUE), r"field '1' is a Opaque, whose rows cannot"),
        ((X, HIDDEN), r"field '1' is a Hidden, whose rows cannot.*_x: float32"),
        ((X, BOX), r"field '1' is a Box, whose rows cannot.*tuple\(float32"),
        ((X, X.to_sparse()), r"field '1' is a torch.sparse_coo tensor.*shared="),
        ((JAGGED, X[:2]), r"field '0' is a nested tensor"),
    ],
)
def test_batch_that_cannot_be_cut_is_refused(batch: Any, text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        cutter().cut(batch)
