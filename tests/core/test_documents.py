"""Where the documents of a batch lie, and batches of some of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening

from trainkit import MicroBatching, PerSample, PerToken, TrainkitError
from trainkit.core.documents import count_documents, find_documents
from trainkit.core.split.cutting import Cutter
from trainkit.core.split.flattening import Flattened

IDS = torch.arange(1, 10)
LABELS = torch.tensor([-100, 2, 3, -100, 5, -100, 7, 8, 9])
ROWS = [{"input_ids": part.tolist()} for part in IDS.split([3, 2, 4])]
NUMBERS = torch.tensor([[1, 1, 2, 2, 2, 0], [1, 1, 1, 2, 3, 3]])
COLUMNS = NUMBERS[:, None, None]
BLOCKS = (COLUMNS.mT == COLUMNS) & (COLUMNS > 0)
CAUSAL = BLOCKS.tril()


def flat(**more: Any) -> dict[str, Any]:
    """One row of three documents."""
    return {"input_ids": IDS[None], "labels": LABELS[None], **more}


def packed(**more: Any) -> dict[str, Any]:
    """Two rows of two and of three documents; the first ends with padding."""
    ids = torch.arange(12).view(2, 6)
    labels = torch.where(NUMBERS > 0, ids, -100)
    return {"input_ids": ids, "labels": labels, **more}


def collated(**options: Any) -> Any:
    return DataCollatorWithFlattening(**options)(ROWS)


@dataclass
class Batch:
    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor


ONE_ROW = [(0, 0, 3), (0, 3, 5), (0, 5, 9)]
TWO_ROWS = [(0, 0, 2), (0, 2, 5), (1, 0, 3), (1, 3, 4), (1, 4, 6)]
PADDED = {"attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])}
FOUND: dict[str, tuple[Any, str, str, list[Any]]] = {
    "collated": (collated(), "auto", "position_ids", ONE_ROW),
    "with offsets": (collated(return_flash_attn_kwargs=True), "auto", "cu_seq_lens_q",
     ONE_ROW),
    "with numbers": (collated(return_seq_idx=True, return_position_ids=False), "auto",
     "seq_idx", ONE_ROW),
    "positions from 2 on": (collated(position_ids_start=2), "auto", "position_ids",
     ONE_ROW),
    "no rows": ({"tokens": IDS, "cu_seqlens": torch.tensor([0, 3, 5, 9])},
     "auto", "cu_seqlens", ONE_ROW),
    "offsets by name": (flat(starts=torch.tensor([0, 3, 5, 9])), "starts", "starts",
     ONE_ROW),
    "numbers by name": (flat(text=torch.tensor([[7, 7, 7, 9, 9, 4, 4, 4, 4]])), "text",
     "text", ONE_ROW),
    "positions of one document, by name": (flat(places=torch.arange(9)[None]),
     "places", "places", [(0, 0, 9)]),
    "a document for each token": (flat(doc_ids=torch.arange(9)[None]), "doc_ids",
     "doc_ids", [(0, n, n + 1) for n in (1, 2, 4, 6, 7, 8)]),
    "filled offsets": (flat(cu_seqlens=torch.tensor([0, 3, 5, 9, -1, -1])), "auto",
     "cu_seqlens", ONE_ROW),
    "offsets of each row": (packed(cu_seqlens=torch.tensor([[0, 2, 5, 6],
     [0, 3, 4, 6]])), "auto", "cu_seqlens", TWO_ROWS),
    "features, and a target of each": ({"x": torch.zeros(9, 2), "y": torch.zeros(3),
     "cu_seqlens": torch.tensor([0, 3, 5, 9])}, "auto", "cu_seqlens", ONE_ROW),
    "labels below 0": (flat(labels=torch.tensor([[-1, 2, 3, -1, 5, -1, -1, -1, -1]]),
     position_ids=torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3]])), "auto",
     "position_ids", ONE_ROW[:2]),
    "a batch in a tuple": ((collated(), 3), "auto", "0.position_ids", ONE_ROW),
    "a data class": (Batch(**{n: collated()[n] for n in Batch.__annotations__}),
     "auto", "position_ids", ONE_ROW),
    "a mask of numbers": (packed(attention_mask=NUMBERS), "auto", "attention_mask",
     TWO_ROWS),
    "a mask of blocks": (packed(attention_mask=CAUSAL), "auto", "attention_mask",
     TWO_ROWS),
    "blocks by name": (packed(sees=CAUSAL), "sees", "sees", TWO_ROWS),
    "a mask to add": (packed(attention_mask=torch.where(CAUSAL, 0.0, -1e9)), "auto",
     "attention_mask", TWO_ROWS),
    "both directions": (packed(attention_mask=BLOCKS), "auto", "attention_mask",
     TWO_ROWS),
    "padding behind": (flat(position_ids=torch.tensor([[0, 1, 2, 0, 1, 0, 0, 0, 0]]),
     labels=torch.tensor([[-100, 2, 3, -100, 5, *[-100] * 4]])), "auto",
     "position_ids", ONE_ROW[:2]),
    "a document without labels": (flat(position_ids=torch.tensor([[0, 1, 2, 0, 1, 0, 1,
     2, 3]]), labels=torch.tensor([[-100, 2, 3, *[-100] * 3, 7, 8, 9]]),
     attention_mask=torch.ones(1, 9).long()), "auto", "position_ids",
     [(0, 0, 3), (0, 5, 9)]),
    "padded rows": ({"x": torch.zeros(2, 4), **PADDED}, "auto", "attention_mask",
     [(0, 0, 3), (1, 0, 4)]),
    "labels that pad with 0": ({"labels": torch.tensor([[1, 2, 3, 0], [1, 2, 3, 4]]),
     **PADDED}, "auto", "attention_mask", [(0, 0, 3), (1, 0, 4)]),
    "a hole in a mask": ({"x": torch.zeros(1, 4),
     "attention_mask": torch.tensor([[1, 0, 1, 1]])}, "auto", "attention_mask",
     [(0, 0, 4)]),
    "left padding": ({"x": torch.zeros(2, 4).long(),
     "position_ids": torch.tensor([[1, 0, 1, 2], [0, 1, 2, 3]]),
     "attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])}, "auto",
     "position_ids", [(0, 1, 4), (1, 0, 4)]),
    "shared positions": ({"x": torch.zeros(2, 4), "y": torch.zeros(2, 4),
     "position_ids": torch.arange(4)[None]}, "auto", "position_ids",
     [(0, 0, 4), (1, 0, 4)]),
}  # fmt: skip
"""A batch, how its documents are told apart, the field that does, and where they are:
in which row, from which column to which."""


@pytest.mark.parametrize("name", FOUND)
def test_documents_are_found_by_what_the_batch_says(name: str) -> None:
    batch, how, by, spans = FOUND[name]
    found: Any = find_documents(batch, how)
    assert (found.by, found.spans) == (by, spans)
    count: Any = count_documents(batch, how)
    weight = PerSample(documents=how).weight(batch)
    assert int(count) == int(weight) == len(spans)


NOTHING = [
    {"x": torch.zeros(3, 4), "y": torch.zeros(3)},
    (torch.zeros(3, 4), torch.zeros(3).long()),
    torch.zeros(3, 4),
    {"x": torch.zeros(3, 5), "attention_mask": torch.zeros(3, 2, 4, 4)},
    {"position_ids": torch.arange(4)[None]},
    {"x": torch.zeros(3, 4).long(), "sequence_id": torch.tensor([5, 5, 6])},
]


@pytest.mark.parametrize("batch", NOTHING, ids=range(len(NOTHING)))
def test_without_a_field_that_tells_rows_are_samples(batch: Any) -> None:
    assert find_documents(batch) is None
    if not isinstance(batch, dict) or "x" in batch:
        assert PerSample().weight(batch) == 3


def test_a_list_of_samples_has_no_documents() -> None:
    samples = [{"input_ids": IDS, "attention_mask": torch.ones(9).long()}] * 3
    assert find_documents(samples) is None
    assert PerSample(size="").weight(samples) == 3
    with pytest.raises(TrainkitError, match="a list of samples"):
        PerSample().weight(samples)


def test_nothing_is_looked_for_where_that_is_said() -> None:
    batch = {n: v for n, v in collated().items() if n != "attention_mask"}
    assert find_documents(batch, "off") is None
    assert PerSample(documents="off").weight(batch) == 1
    assert int(PerSample().weight(batch)) == 3


REFUSED: dict[str, tuple[Any, str]] = {
    "a field that tells nothing": (flat(x=torch.zeros(9)), "x"),
    "a path that leads nowhere": (flat(), "starts"),
    "labels": (flat(), "labels"),
    "lengths": (flat(lengths=torch.tensor([3, 2, 4])), "lengths"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_tells_nothing_is_refused(name: str) -> None:
    batch, how = REFUSED[name]
    with pytest.raises(TrainkitError, match=f"{how!r}: .*the batch"):
        find_documents(batch, how)


@pytest.mark.parametrize("kind", [PerSample, PerToken, MicroBatching])
@pytest.mark.parametrize("documents", [None, "", 3])
def test_the_option_is_a_word_or_a_path(kind: Any, documents: Any) -> None:
    with pytest.raises(TrainkitError, match="documents: must be 'auto', 'off'"):
        kind(documents=documents)


# ---- batches of some -----------------------------------------------------------------


def test_all_that_tells_of_documents_is_made_anew() -> None:
    names = torch.tensor([[4, 4, 4, 5, 5, 6, 6, 6, 6]])
    batch = {
        **collated(return_flash_attn_kwargs=True, return_seq_idx=True),
        "doc_ids": names,
        "weights": torch.tensor([0.1, 0.2, 0.3]),
        "sources": ["a", "b", "c"],
        "notes": ["of", "all"],
        "scale": torch.tensor(2.0),
        "table": torch.zeros(4, 4),
        "states": torch.arange(18.0).view(1, 9, 2),
        "bounds": torch.tensor([0, 3, 5, 9]),
        "places": torch.arange(9).expand(3, 1, 9),
    }
    documents: Any = find_documents(batch)
    part = Flattened.read(batch, documents).of([0, 2])
    expected: dict[str, Any] = {
        "input_ids": [[1, 2, 3, 6, 7, 8, 9]],
        "labels": [[-100, 2, 3, -100, 7, 8, 9]],
        "position_ids": [[0, 1, 2, 0, 1, 2, 3]],
        "cu_seq_lens_q": [0, 3, 7],
        "cu_seq_lens_k": [0, 3, 7],
        "seq_idx": [[0, 0, 0, 1, 1, 1, 1]],
        "doc_ids": [[4, 4, 4, 5, 5, 5, 5]],
        "scale": 2.0,
        "bounds": [0, 3, 7],
        "places": 3 * [[[0, 1, 2, 5, 6, 7, 8]]],
    }
    for name, values in expected.items():
        assert part[name].tolist() == values, name
        assert part[name].dtype == batch[name].dtype
    assert (part["max_length_q"], part["sources"]) == (4, ["a", "c"])
    torch.testing.assert_close(part["weights"], torch.tensor([0.1, 0.3]))
    assert part["table"] is batch["table"]
    assert part["notes"] is batch["notes"]
    assert part["states"].shape == (1, 7, 2)


def test_a_mask_of_blocks_is_cut_and_rows_do_not_see_each_other() -> None:
    batch = packed(attention_mask=CAUSAL)
    documents: Any = find_documents(batch)
    mask: Tensor = Flattened.read(batch, documents).of([1, 2])["attention_mask"]
    blocks = torch.block_diag(torch.ones(3, 3).tril(), torch.ones(3, 3).tril())
    assert torch.equal(mask, blocks.bool()[None, None])


def test_what_each_document_has_stays_with_it_also_where_one_has_no_label() -> None:
    """It has a reward, so it is no padding, and weighs what the strategy says."""
    labels = torch.where(torch.arange(9) == 4, -100, LABELS)[None]
    batch = {**collated(), "labels": labels, "rewards": torch.tensor([0.1, 0.2, 0.3])}
    cut = Cutter(MicroBatching(size=1), PerToken()).cut(batch)
    found = {part.batch["input_ids"].shape[1]: part.batch["rewards"] for part in cut}
    for length, reward in ((3, 0.1), (2, 0.2), (4, 0.3)):
        torch.testing.assert_close(found[length], torch.tensor([reward]))
    rest = {name: value for name, value in batch.items() if name != "rewards"}
    assert len(Cutter(MicroBatching(size=1), PerToken()).cut(rest)) == 2


def test_a_field_is_shared_where_that_is_said_and_cut_by_what_it_is() -> None:
    batch = collated()
    batch |= {"table": torch.zeros(1, 9, 2), "biases": torch.zeros(2, 9, 9)}
    batch |= {"states": torch.zeros(1, 9, 9), "scale": torch.zeros(5)}
    cutter = Cutter(MicroBatching(size=1, shared=("table",)), PerToken())
    part = cutter.cut(batch)[0].batch
    assert part["table"] is batch["table"]
    assert part["biases"].shape == (2, 4, 4)
    assert part["states"].shape == (1, 4, 9)  # as wide as the row by chance
    assert {field.path for field in cutter.read(batch).shared} == {"table", "scale"}


# ---- cuts ----------------------------------------------------------------------------

CUTS: dict[str, tuple[Any, Any, list[list[int]]]] = {
    "all": (flat(cu_seqlens=torch.tensor([0, 3, 5, 9])), {}, [[0, 1, 2]]),
    "size": (collated(), {"size": 2}, [[0, 1], [2]]),
    "tokens": (collated(), {"tokens": 5}, [[0, 1], [2]]),
    "both": (collated(), {"tokens": 9, "size": 1}, [[2], [0], [1]]),
    "over the budget": (collated(), {"tokens": 3}, [[2], [0], [1]]),
    "rows of a pack": (packed(attention_mask=NUMBERS), {"size": 1}, [[1], [0]]),
    "documents of a pack": (packed(attention_mask=NUMBERS),
     {"size": 3, "documents": "attention_mask"}, [[0, 2], [1, 3, 4]]),
    "rows": (flat(position_ids=torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3]])),
     {"size": 1, "documents": "off"}, [[0]]),
    "rows, as the strategy says": (collated(), {"size": 1, "strategy": "off"}, [[0]]),
    "by what the strategy names": (flat(starts=torch.tensor([0, 3, 5, 9])),
     {"size": 1, "strategy": "starts"}, [[0], [1], [2]]),
}  # fmt: skip


@pytest.mark.parametrize("name", CUTS)
def test_batches_are_cut_between_documents(name: str) -> None:
    batch, options, parts = CUTS[name]
    own = {name: value for name, value in options.items() if name != "strategy"}
    strategy = PerToken(documents=options.get("strategy", "auto"))
    cut = Cutter(MicroBatching(**own), strategy).cut(batch)
    assert sorted(each.rows for each in cut) == sorted(parts)
    tokens = [each.batch["labels"] != -100 for each in cut]
    assert sum(int(each.sum()) for each in tokens) == int(PerToken().weight(batch))
    padded = [each.padded for each in cut]
    assert padded == sorted(padded, reverse=True)


def test_offsets_into_several_rows_at_once_are_not_cut() -> None:
    """The control: with a row of offsets for each row, they are."""
    batch = packed(cu_seqlens=torch.tensor([0, 2, 5, 6, 9, 10, 12]))
    assert find_documents(batch) is None
    with pytest.raises(TrainkitError, match="cu_seqlens: offsets must lead into one"):
        Cutter(MicroBatching(size=1), PerToken()).cut(batch)
    batch["cu_seqlens"] = torch.tensor([[0, 2, 5, 6], [0, 3, 4, 6]])
    assert len(Cutter(MicroBatching(size=1), PerToken()).cut(batch)) == 2
