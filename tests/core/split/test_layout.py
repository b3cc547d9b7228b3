"""What of a batch is trimmed and how long its rows are, by the declared rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.core.split.common import Side, mask_of, ragged
from trainkit import PerToken, TrainkitError, Uniform
from trainkit.core.split.cutting import Cutter
from trainkit.core.split.micro_batching import MicroBatching

LENGTHS = [5, 2, 7, 1]
FULL = [7] * 4


def cut(batch: Any, strategy: Any = None, **options: Any) -> list[Any]:
    """The batches of one row each, in the order of the rows."""
    cutter = Cutter(MicroBatching(**{"size": 1, **options}), strategy or PerToken())
    return [m.batch for m in sorted(cutter.cut(batch), key=lambda micro: micro.rows)]


def columns(batches: list[Any], field: str = "ids") -> list[int]:
    return [batch[field].shape[1] for batch in batches]


def without_mask(**more: Any) -> dict[str, Any]:
    batch = {**ragged(LENGTHS), **more}
    del batch["attention_mask"]
    return batch


# ---- lengths -------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["right", "left", "mixed"])
def test_attention_mask_tells_lengths(side: Side) -> None:
    mask = mask_of(LENGTHS, side=side)
    for kind in (mask, mask.bool(), mask * 0.5):
        batch = {**ragged(LENGTHS, side=side), "attention_mask": kind}
        for strategy in (PerToken(), Uniform()):
            for row, part in enumerate(cut(batch, strategy)):
                assert part["attention_mask"].bool().all()
                kept = batch["ids"][row][mask[row].bool()]
                assert torch.equal(part["ids"][0], kept)
    # Negative control: elsewhere it has to be named.
    batch = ragged(LENGTHS, side=side)
    batch["m"] = batch.pop("attention_mask")
    assert columns(cut(batch, Uniform())) == FULL
    assert columns(cut(batch, Uniform(), lengths="m")) == LENGTHS


def test_masked_inside_is_kept_and_all_masked_is_one_column() -> None:
    mask = torch.tensor([[0, 1, 0, 1, 0], [0, 0, 0, 0, 0]])
    batch = {"ids": mask.clone(), "attention_mask": mask}
    assert columns(cut(batch, Uniform())) == [3, 1]
    deep = mask.unsqueeze(2).expand(-1, -1, 3)
    assert columns(cut({"ids": mask, "m": deep}, Uniform(), lengths="m")) == [3, 1]


def test_labels_tell_lengths_and_a_prompt_is_kept() -> None:
    batch = without_mask()
    batch["labels"][2, :4] = -100
    assert columns(cut(batch)) == LENGTHS
    assert columns(cut(batch, lengths="labels")) == LENGTHS
    micros = Cutter(MicroBatching(tokens=10), PerToken()).cut(batch)
    assert sum(micro.real for micro in micros) == sum(LENGTHS)
    assert sum(micro.padded for micro in micros) < 4 * 7
    batch["labels"][1] = -100  # a row without labels can be of any length
    assert columns(cut(batch)) == [5, 7, 7, 1]


def test_token_weights_of_the_strategy_tell_lengths() -> None:
    batch = without_mask(w=mask_of(LENGTHS) * 0.5)
    assert columns(cut(batch, PerToken(mask="w"))) == LENGTHS


def test_labels_that_count_are_kept_where_a_mask_leaves_them_out() -> None:
    """Sources and targets that are padded to one width, as by `max_length`."""
    batch = ragged(LENGTHS)
    batch["labels"] = ragged([2, 6, 7, 3])["labels"]
    assert columns(cut(batch), "labels") == [5, 6, 7, 3]
    assert columns(cut(batch, lengths="attention_mask")) == [5, 6, 7, 3]
    # Negative control: a strategy without labels knows the mask alone.
    assert columns(cut(batch, Uniform()), "labels") == LENGTHS
    batch["labels"][1:] = -100  # rows without any label are as long as their mask
    assert columns(cut(batch), "labels") == LENGTHS


def test_mask_that_is_added_is_not_taken_for_an_attention_mask() -> None:
    mask = mask_of(LENGTHS)
    batch = {"ids": mask, "attention_mask": (mask - 1.0) * 1e9}
    assert columns(cut(batch, Uniform())) == FULL


@pytest.mark.parametrize(
    ("lengths", "text"),
    [
        ("nothing", r"path 'nothing': the batch has nothing at 'nothing'"),
        ("one", r"lengths 'one': must be the path of a mask.*float32\[\]"),
        ("words", r"lengths 'words': must be the path of a mask.*list\(str"),
        ("added", r"lengths 'added': must be the path of a mask, .*0 for padding"),
        ("numbers", r"lengths 'numbers': .*torch.arange\(longest\) < lengths"),
        (("mask", "other"), r"lengths: .*the 4 rows.*has 3"),
    ],
)
def test_lengths_that_are_none_are_refused(lengths: Any, text: str) -> None:
    mask = mask_of(LENGTHS)
    batch = {
        "ids": mask,
        "mask": mask,
        "one": torch.tensor(1.0),
        "words": list("abcd"),
        "added": (mask - 1.0) * 1e9,
        "numbers": torch.tensor(LENGTHS),
        "other": torch.ones(3, 7),
    }
    with pytest.raises(TrainkitError, match=text):
        cut(batch, Uniform(), lengths=lengths)


# ---- columns -------------------------------------------------------------------------


def test_what_is_as_wide_as_the_mask_is_trimmed() -> None:
    batch = ragged(LENGTHS)
    batch["positions"] = torch.arange(7).expand(4, 7)
    batch["deep"] = torch.randn(4, 7, 3)
    batch["array"] = batch["ids"].numpy()
    batch["features"] = torch.randn(4, 6)
    batch["weight"] = torch.randn(4)
    trimmed = cut(batch)
    for field in ("ids", "labels", "positions", "deep", "array"):
        assert columns(trimmed, field) == LENGTHS
    assert columns(trimmed, "features") == [6] * 4
    assert all(each["weight"].shape == (1,) for each in trimmed)
    assert isinstance(trimmed[0]["array"], np.ndarray)
    for row, length in enumerate(LENGTHS):
        assert torch.equal(trimmed[row]["deep"], batch["deep"][row : row + 1, :length])
    assert columns(cut(batch, trim=False)) == FULL


def test_a_field_that_once_had_another_width_is_not_trimmed_by_chance() -> None:
    cutter = Cutter(MicroBatching(size=1), PerToken())
    for lengths, widths in ((LENGTHS, [6] * 4), ([6, 2, 3, 1], [6] * 4)):
        batch = {**ragged(lengths), "features": torch.zeros(4, 6)}
        micros = sorted(cutter.cut(batch), key=lambda micro: micro.rows)
        assert [m.batch["features"].shape[1] for m in micros] == widths
    # Negative control: seen first in that batch, it looks ragged.
    assert columns(cut(batch), "features") == [6, 2, 3, 1]


def test_further_dimensions_are_trimmed_where_named() -> None:
    batch = ragged(LENGTHS)
    batch["mask4d"] = torch.zeros(4, 1, 7, 7)
    batch["table"] = torch.randn(4, 7)
    trimmed = cut(batch, ragged={"mask4d": (2, -1), "table": ()})
    assert [each["mask4d"].shape for each in trimmed] == [
        (1, 1, length, length) for length in LENGTHS
    ]
    assert columns(trimmed, "table") == FULL
    with pytest.raises(TrainkitError, match=r"dimension 1 of field 'mask4d'.*is 1"):
        cut(batch, ragged={"mask4d": (1, 2)})
    with pytest.raises(TrainkitError, match=r"path 'nothing': the batch has nothing"):
        cut(batch, ragged={"nothing": 2})


def test_shared_field_of_as_many_rows_is_neither_cut_nor_trimmed() -> None:
    batch = {**ragged(LENGTHS), "table": torch.randn(4, 7)}
    for each in cut(batch, shared=["table"]):
        assert each["table"] is batch["table"]


def test_left_padding_goes_from_the_left() -> None:
    batch = ragged([4, 1, 2], side="left")
    micros = Cutter(MicroBatching(size=2), PerToken()).cut(batch)
    (micro,) = (each for each in micros if each.rows == [1, 2])
    assert torch.equal(micro.batch["ids"], batch["ids"][1:, 2:])
    assert (micro.padded, micro.trimmed) == (4, 4)


def test_untrimmed_rows_count_as_full_in_the_budget() -> None:
    for options, trim in (({"trim": False}, True), ({}, False)):
        cutter = Cutter(MicroBatching(tokens=14, **options), PerToken())  # type: ignore[arg-type]
        micros = cutter.cut(ragged(LENGTHS), trim=trim)
        assert [(micro.padded, micro.trimmed) for micro in micros] == [(14, 0)] * 2
        assert all(micro.batch["ids"].shape == (2, 7) for micro in micros)
    # Negative control: trimmed, more rows fit.
    micros = Cutter(MicroBatching(tokens=14), PerToken()).cut(ragged(LENGTHS))
    assert [micro.padded for micro in micros] == [14, 4]


@pytest.mark.parametrize("rows", [[0, 1], [1, 3], [2], [0, 1, 2, 3]], ids=str)
def test_pair_is_the_same_rows_trimmed_and_untrimmed(rows: list[int]) -> None:
    batch = {**ragged(LENGTHS), "weight": torch.arange(4.0)}
    trimmed, whole = Cutter(MicroBatching(size=1), PerToken()).pair(batch, rows)
    longest = max(LENGTHS[row] for row in rows)
    for name, value in batch.items():
        assert torch.equal(whole[name], value[rows])
        assert torch.equal(trimmed[name], value[rows][..., :longest])
