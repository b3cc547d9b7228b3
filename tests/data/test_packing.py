"""`PackCollate` makes what transformers takes, and fills rows of a fixed length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DataCollatorWithFlattening

from trainkit import PackCollate, PerSample, PerToken, TrainkitError
from trainkit.core.documents import find_documents

IDS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
ROWS: list[Any] = [{"input_ids": ids} for ids in IDS]
LABELLED: list[Any] = [{"input_ids": ids, "labels": ids[::-1]} for ids in IDS]


@pytest.mark.parametrize("rows", [ROWS, LABELLED], ids=["ids", "labels"])
def test_a_batch_is_what_transformers_own_collator_makes(rows: Any) -> None:
    theirs: Any = DataCollatorWithFlattening(
        return_flash_attn_kwargs=True, return_seq_idx=True
    )(rows)
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
def test_labels_of_documents_that_are_as_many_as_the_tokens_of_one_are_no_tokens(
    options: Any,
) -> None:
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
    assert {name: tuple(batch[name].shape) for name in batch} == dict.fromkeys(
        tokens, shape
    )
    assert int(PerToken().weight(batch)) == 6
    assert int(PerSample().weight(batch)) == 3
    found = find_documents(batch)
    assert found is not None
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
        "fields of the first, received one without token_type_ids",
    ),
]


@pytest.mark.parametrize(("options", "rows", "text"), REFUSED)
def test_what_cannot_be_packed_is_refused(options: Any, rows: Any, text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        PackCollate(**options)(rows)
