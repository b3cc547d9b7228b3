"""Loader batches that are joined, as the collate function would have made them one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.core.split.common import ragged
from trainkit import MicroBatching, PackCollate, PadCollate, PerToken, TrainkitError
from trainkit.core.split.cutting import Cutter

LENGTHS = ([5, 2, 3], [9, 1], [4])


def join(batches: Any, **options: Any) -> Any:
    return Cutter(MicroBatching(tokens=64, **options), PerToken()).join(batches)


def assert_alike(mine: Any, other: Any) -> None:
    assert list(mine) == list(other)
    for name, value in other.items():
        same = torch.equal(mine[name], value) if isinstance(value, Tensor) else None
        assert same if same is not None else mine[name] == value, name


def test_padded_batches_become_one_as_wide_as_the_widest() -> None:
    pad = PadCollate({"labels": -100}, mask="attention_mask")
    rows = [
        {"ids": ids, "labels": ids + 1, "name": "ab", "class": len(ids)}
        for lengths in LENGTHS
        for ids in (torch.arange(1, n + 1) for n in lengths)
    ]
    batches = [pad(rows[:3]), pad(rows[3:5]), pad(rows[5:])]
    assert_alike(join(batches), pad(rows))
    assert join(batches[:1]) is batches[0]


@pytest.mark.parametrize("drop", [(), ("seq_idx", "position_ids"), ("cu_seq_lens_q",)])
def test_flattened_batches_become_one_row(drop: tuple[str, ...]) -> None:
    """By offsets, positions or numbers, which are those of the whole row."""
    rows: Any = [{"input_ids": [*range(3, 3 + n)]} for own in LENGTHS for n in own]
    rows = [{**row, "weight": 0.5, "note": "a"} for row in rows]
    batches = [PackCollate()(each) for each in (rows[:3], rows[3:5], rows[5:])]
    whole = PackCollate()(rows)
    for each in [*batches, whole]:
        for name in drop:
            del each[name]
    assert_alike(join(batches), whole)


def test_numbers_of_documents_in_a_mask_go_on() -> None:
    """What only fills the rows is left out."""
    first = {"input_ids": torch.ones(1, 4).long(), "labels": torch.ones(1, 4).long()}
    first["labels"][0, 3] = -100
    one = {**first, "attention_mask": torch.tensor([[1, 1, 2, 0]])}
    other = {**first, "attention_mask": torch.tensor([[1, 2, 2, 0]])}
    joined = join([one, other])
    assert joined["attention_mask"].tolist() == [[1, 1, 2, 3, 4, 4]]
    assert joined["labels"].tolist() == [[1] * 6]


def test_flattened_batches_keep_what_each_document_has_and_what_all_share() -> None:
    first = {**FLAT, "target": torch.tensor([1.0, 2.0]), "name": ["a", "b"]}
    second = {**FLAT, "target": torch.tensor([3.0, 4.0]), "name": ["c", "d"]}
    table, words = torch.arange(7.0), ["x", "y", "z"]
    joined = join(
        [{**each, "table": table, "words": words} for each in (first, second)]
    )
    assert joined["target"].tolist() == [1, 2, 3, 4]
    assert joined["name"] == ["a", "b", "c", "d"]
    assert torch.equal(joined["table"], table)
    assert joined["words"] == words


def test_lists_of_samples_become_one() -> None:
    assert join([[1, 2], [3]], collate=list) == [1, 2, 3]


BATCH = ragged([3, 2])
FLAT = PackCollate()([{"input_ids": [3, 4]}, {"input_ids": [5, 6, 7]}])


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (BATCH, {**BATCH, "x": 1}, r"\['x'\] must have the same fields"),
        ({**BATCH, "n": 3}, {**BATCH, "n": 4}, "'n' is shared by its rows, and diff"),
        (
            {**BATCH, "table": torch.zeros(5)},
            {**BATCH, "table": torch.ones(5)},
            "'table' is shared by its rows, and differs",
        ),
        (
            {**BATCH, "x": torch.zeros(2, 7)},
            {**BATCH, "x": torch.zeros(2, 8)},
            "'x' differs in size, and no mask",
        ),
        (BATCH, FLAT, "'documents' are told apart in some of them only"),
        (
            {**FLAT, "attention_mask": torch.ones(1, 1, 5, 5)},
            {**FLAT, "attention_mask": torch.ones(1, 1, 5, 5)},
            "mask of blocks",
        ),
    ],
    ids=["fields", "number", "table", "width", "documents", "blocks"],
)
def test_batches_that_are_unlike_are_refused(
    first: Any, second: Any, text: str
) -> None:
    with pytest.raises(TrainkitError, match=f"pool: .*{text}"):
        join([first, second])
