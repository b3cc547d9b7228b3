"""Ragged samples become a batch: padded, where what was filled up can be told, or
packed, as transformers takes them, in rows of a fixed length."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence
from transformers import DataCollatorWithFlattening

from tests.core.split.common import Pair
from trainkit import PackCollate, PadCollate, PerSample, PerToken, TrainkitError
from trainkit.core.documents import find_documents

# ---- PadCollate ----------------------------------------------------------------------


def samples(*lengths: int) -> list[dict[str, Any]]:
    return [
        {"ids": torch.arange(1, n + 1), "labels": [*range(n)], "weight": 0.5,
         "name": f"row {n}"}
        for n in lengths
    ]  # fmt: skip


def test_fields_of_every_kind() -> None:
    batch = PadCollate({"labels": -100}, mask="mask")(samples(3, 1))
    assert batch["ids"].tolist() == [[1, 2, 3], [1, 0, 0]]
    assert batch["labels"].tolist() == [[0, 1, 2], [0, -100, -100]]
    assert batch["weight"].tolist() == [0.5, 0.5]
    assert batch["name"] == ["row 3", "row 1"]
    assert batch["mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert PerToken().weight(batch) == 4  # padding weighs nothing


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6))
@settings(max_examples=50)
def test_padding_equals_torchs_pad_sequence(lengths: list[int]) -> None:
    rows = [torch.arange(length) for length in lengths]
    reference = pad_sequence(rows, batch_first=True, padding_value=7)
    assert torch.equal(PadCollate({0: 7})(rows), reference)


def test_samples_keep_their_form() -> None:
    x, y = torch.ones(2), torch.ones(3)
    as_tuple = PadCollate({1: -1})([(x, y), (y, x)])
    assert isinstance(as_tuple, tuple)
    assert as_tuple[1].tolist() == [[1, 1, 1], [1, 1, -1]]
    as_list = PadCollate()([[x, "a"], [y, "b"]])
    assert isinstance(as_list, list)
    assert as_list[1] == ["a", "b"]
    named = PadCollate()([Pair([1], "a"), Pair([2, 3], "b")])  # type: ignore[arg-type]
    assert isinstance(named, Pair)
    assert named.x.tolist() == [[1, 0], [2, 3]]
    assert PadCollate({0: 9})([[1, 2], [3]]).tolist() == [[1, 2], [3, 9]]
    assert PadCollate()([(1, 2.0), (3, 4.0)])[0].tolist() == [1, 3]


def test_fields_of_other_lengths_are_filled_up_by_themselves() -> None:
    """Source and target of a translation, features of a spectrogram."""
    rows = [
        {"target": torch.ones(5), "source": torch.ones(2), "image": torch.ones(3, 2)},
        {"target": torch.ones(1), "source": torch.ones(4), "image": torch.ones(1, 4)},
    ]
    batch = PadCollate(mask="mask")(rows)
    assert batch["target"].shape == (2, 5)
    assert batch["source"].shape == (2, 4)
    assert batch["image"].shape == (2, 3, 4)
    assert batch["mask"].sum(1).tolist() == [5, 1]


def test_floats_may_be_filled_up_with_anything() -> None:
    rows = [{"x": [0.1]}, {"x": [0.2, 0.3]}]
    for value in (0.1, -1e9, float("inf")):
        batch = PadCollate({"x": value})(rows)
        assert batch["x"][0, 1] == torch.tensor(value)
    assert PadCollate({"x": float("nan")})(rows)["x"][0, 1].isnan()


def test_types_are_kept_and_joined() -> None:
    rows = [{"x": np.ones(2, dtype=np.float32)}, {"x": np.ones(3, dtype=np.float64)}]
    assert PadCollate()(rows)["x"].dtype == torch.float64
    flags = [{"x": torch.tensor([True])}, {"x": torch.tensor([True, True])}]
    assert PadCollate()(flags)["x"].tolist() == [[True, False], [True, True]]
    batch = PadCollate()([{"x": [1, 2]}, {"x": []}])  # a row of length nothing
    assert batch["x"].tolist() == [[1, 2], [0, 0]]
    assert batch["x"].dtype == torch.long
    array = np.arange(3)
    array.flags.writeable = False  # it is copied
    assert PadCollate()([array, array])[1].tolist() == [0, 1, 2]
    texts = (np.ones(2) > 0).astype(str)  # are no numbers
    batch = PadCollate()([{"x": [1], "name": text, "all": texts} for text in texts])
    assert (batch["name"], batch["all"]) == (["True", "True"], [texts, texts])


X1 = [{"x": [1]}]
UNLIKE = [{"x": torch.ones(2)}, {"x": torch.ones(2, 1)}]
OTHER_DIMENSIONS = r"field 'x' must have as many dimensions .* \(2, 1\), \(2,\)"


@pytest.mark.parametrize(
    ("pad", "rows", "text"),
    [
        (PadCollate(), UNLIKE, OTHER_DIMENSIONS),
        (PadCollate(), [{"x": 1}, {}], "fields of the first .*'x', received .* none"),
        (PadCollate(), [{"x": 1}, {"x": 1, "y": 2}], "'x', received one with 'x', 'y'"),
        (PadCollate(), [(1, 2), (1,)], "0, 1, received one with 0"),
        (PadCollate(mask="m"), [{"x": 1}], "mask: needs a field that has a length"),
        (PadCollate(mask="x"), X1, "mask: .* received 'x' .* that have such a field"),
        (PadCollate(mask="n"), [[1, 2]], "mask: samples must be mappings"),
        (PadCollate({"z": 1}), X1, "fill: must name fields .* received 'z'.* 'x'"),
        (PadCollate({"x": 0.5}), X1, "fill 'x': must be .*int64, received 0.5"),
        (PadCollate({0: -1}), [torch.ones(1).bool()], "fill 0: .*bool, received -1"),
        (PadCollate(), [*X1, {"x": "text"}], "field 'x' must be numbers in every"),
        (PadCollate(), [], "at least one sample, received none"),
    ],
)
def test_what_cannot_be_stacked_is_refused(pad: Any, rows: Any, text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        pad(rows)


def test_options_are_checked() -> None:
    with pytest.raises(TrainkitError, match="fill: must be a dict, .* received -100"):
        PadCollate(-100)  # type: ignore[arg-type]


# ---- PackCollate ---------------------------------------------------------------------

IDS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
ROWS: list[Any] = [{"input_ids": ids} for ids in IDS]
LABELLED: list[Any] = [{"input_ids": ids, "labels": ids[::-1]} for ids in IDS]


@pytest.mark.parametrize("rows", [ROWS, LABELLED], ids=["ids", "labels"])
def test_a_batch_is_what_transformers_own_collator_makes(rows: Any) -> None:
    how = {"return_flash_attn_kwargs": True, "return_seq_idx": True}
    theirs: Any = DataCollatorWithFlattening(**how)(rows)
    ours = PackCollate()(rows)
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        if isinstance(value, int):
            assert ours[name] == value
        else:
            assert torch.equal(ours[name], value), name
            assert ours[name].dtype == value.dtype, name


def test_other_fields_have_an_entry_for_each_token_or_for_each_document() -> None:
    rows = [
        {"input_ids": torch.tensor(ids), "scores": torch.ones(len(ids), 2),
         "attention_mask": [1] * len(ids), "weight": 0.5, "source": str(n)}
        for n, ids in enumerate(IDS)
    ]  # fmt: skip
    batch = PackCollate()(rows)
    assert batch["scores"].shape == (1, 9, 2)
    assert batch["weight"].tolist() == [0.5] * 3
    assert batch["source"] == ["0", "1", "2"]
    assert "attention_mask" not in batch
    rows = [{"input_ids": ids, "source": [str(n)]} for n, ids in enumerate(IDS)]
    sources = PackCollate(length=5)(rows)["source"]
    assert sorted(sources) == [["0"], ["1"], ["2"]]


@pytest.mark.parametrize("options", [{}, {"length": 6}])
def test_labels_as_many_as_the_tokens_of_one_are_no_tokens(options: Any) -> None:
    """The control: a document by itself, of which nobody can say otherwise."""
    rows = [{"input_ids": [5, 6, 7], "labels": [1, 0, 1]},
            {"input_ids": [8, 9], "labels": [0, 1, 1]}]  # fmt: skip
    collate = PackCollate(**options)
    for order in (rows, rows[::-1]):
        assert collate(order)["labels"].tolist() == [row["labels"] for row in order]
    assert collate(rows[:1])["labels"][0, :3].tolist() == [-100, 0, 1]


def test_samples_may_be_lists_of_ids() -> None:
    assert PackCollate()(IDS)["input_ids"].tolist() == [list(range(1, 10))]


SHAPES: list[tuple[dict[str, Any], tuple[int, int]]] = [
    ({"length": 12}, (1, 12)),
    ({"length": 9}, (1, 9)),
    ({"length": 5}, (2, 5)),
    ({"length": 4}, (3, 4)),
    ({"lengths": (16, 8, 4)}, (1, 16)),
    ({"lengths": (16, 10, 4)}, (1, 10)),
    ({"lengths": (4, 6)}, (2, 6)),
]


@pytest.mark.parametrize(("options", "shape"), SHAPES)
def test_rows_are_filled_with_what_counts_nothing(options: Any, shape: Any) -> None:
    batch = PackCollate(**options)(ROWS)
    tokens = ("input_ids", "labels", "position_ids", "seq_idx")
    shapes = {name: tuple(value.shape) for name, value in batch.items()}
    assert shapes == dict.fromkeys(tokens, shape)
    assert int(PerToken().weight(batch)) == 6
    assert int(PerSample().weight(batch)) == 3
    found: Any = find_documents(batch)
    own = [batch["input_ids"][s.row, s.start : s.stop].tolist() for s in found.spans]
    assert sorted(own) == sorted(IDS)


REFUSED: list[tuple[dict[str, Any], Any, str]] = [
    ({"length": 4, "lengths": (4,)}, ROWS, "length and lengths exclude each other"),
    ({"length": 0}, ROWS, "length: must be a whole number"),
    ({"lengths": 4}, ROWS, "lengths: must be several, as .* received 4"),
    ({"lengths": (4, "8")}, ROWS, "length: must be a whole number"),
    ({"length": 3}, ROWS, "row of 3 tokens, received one of 4"),
    ({}, [], "needs at least one sample"),
    ({}, [{"ids": [1]}], "must have input_ids, received one with 'ids'"),
    ({}, [{"input_ids": []}], "of one at least.*Leave empty documents out"),
    ({}, [{"input_ids": "text"}], "must be a list of ids"),
    (
        {},
        [ROWS[0], {"input_ids": [7, 8, 9], "labels": [7, 8]}],
        r"labels must have an entry for each token .* received \(\d,\), \(2,\)",
    ),
    (
        {},
        [{**ROWS[0], "token_type_ids": [0, 0, 1]}, ROWS[1]],
        "fields of the first and no others, .*token_type_ids",
    ),
    (
        {},
        [ROWS[0], {**ROWS[1], "token_type_ids": [0, 0, 1]}],
        "fields of the first and no others, .*token_type_ids",
    ),
    ({}, [torch.ones(3, dtype=torch.uint8)], r"can be -100, .* received torch\.uint8"),
    ({}, [{**ROWS[0], "labels": None}], "can be -100, .* received NoneType"),
]


@pytest.mark.parametrize(("options", "rows", "text"), REFUSED)
def test_what_cannot_be_packed_is_refused(options: Any, rows: Any, text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        PackCollate(**options)(rows)
