"""What of each row is padding, from a mask, numbers or labels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.core.split.common import Side, mask_of, ragged
from trainkit import PerToken, TrainkitError, Uniform
from trainkit.core.split.cutting import Cutter
from trainkit.core.split.lengths import spans_of
from trainkit.core.split.micro_batching import MicroBatching

LENGTHS = [5, 2, 7, 1]


def shapes(batch: Any, strategy: Any, field: str = "ids", **options: Any) -> list[int]:
    """The columns that each row gets in a micro-batch of its own."""
    options = {"size": 1, **options}
    micros = Cutter(MicroBatching(**options), strategy).cut(batch)
    micros.sort(key=lambda micro: micro.rows)
    return [micro.batch[field].shape[1] for micro in micros]


@pytest.mark.parametrize("side", ["right", "left", "mixed"])
def test_spans_of_a_mask_are_its_first_to_last(side: Side) -> None:
    mask = mask_of(LENGTHS, side=side)
    for kind in (mask, mask.bool(), mask * 0.5, mask.unsqueeze(2).expand(-1, -1, 3)):
        spans = spans_of(kind)
        for row, (start, stop) in enumerate(spans):
            assert mask[row, start:stop].all()
            assert mask[row].sum() == stop - start


def test_masked_inside_is_kept_and_all_masked_is_one_column() -> None:
    mask = torch.tensor([[0, 1, 0, 1, 0], [0, 0, 0, 0, 0]])
    assert spans_of(mask) == [(1, 4), (0, 1)]
    batch = {"ids": mask.clone(), "attention_mask": mask}
    assert shapes(batch, Uniform()) == [3, 1]


@pytest.mark.parametrize("side", ["right", "left", "mixed"])
def test_attention_mask_is_found(side: Side) -> None:
    batch = ragged(LENGTHS, side=side)
    assert shapes(batch, PerToken()) == LENGTHS
    assert shapes(batch, Uniform()) == LENGTHS
    # Negative control: elsewhere it has to be named.
    batch["m"] = batch.pop("attention_mask")
    assert shapes(batch, Uniform()) == [7] * 4
    assert shapes(batch, Uniform(), lengths="m") == LENGTHS


@pytest.mark.parametrize(
    "found", [LENGTHS, torch.tensor(LENGTHS), torch.tensor(LENGTHS).unsqueeze(1)]
)
def test_numbers_are_lengths(found: Any) -> None:
    batch = {**ragged(LENGTHS), "n": found}
    del batch["attention_mask"]
    assert shapes(batch, PerToken(), lengths="n") == LENGTHS


def test_numbers_below_the_padded_length_are_lengths() -> None:
    batch = {"ids": mask_of(LENGTHS, padded_length=8), "n": torch.tensor(LENGTHS)}
    assert shapes(batch, Uniform(), lengths="n") == LENGTHS


def test_numbers_are_lengths_of_the_dimension_that_is_named_as_ragged() -> None:
    """Sound comes as rows by channels by time, and images of it by frequency."""
    waves = torch.randn(4, 3, 9) * mask_of(LENGTHS, padded_length=9).unsqueeze(1)
    batch = {"waves": waves, "n": torch.tensor(LENGTHS)}
    options = MicroBatching(size=1, lengths="n", ragged={"waves": 2})
    parts = Cutter(options, Uniform()).cut(batch)
    by_row = {part.rows[0]: part.batch["waves"] for part in parts}
    for row, length in enumerate(LENGTHS):
        assert torch.equal(by_row[row], waves[row : row + 1, :, :length])
    with pytest.raises(TrainkitError, match=r"found are \[3\].*ragged=\{'waves': 2\}"):
        Cutter(MicroBatching(size=1, lengths="n"), Uniform()).cut(batch)


def test_labels_tell_lengths() -> None:
    batch = ragged(LENGTHS)
    del batch["attention_mask"]
    assert shapes(batch, PerToken()) == LENGTHS
    batch["labels"][2, :4] = -100  # a prompt, which is no padding
    assert shapes(batch, PerToken()) == LENGTHS
    micros = Cutter(MicroBatching(tokens=10), PerToken()).cut(batch)
    assert sum(micro.real for micro in micros) == sum(LENGTHS)
    assert sum(micro.padded for micro in micros) < 4 * 7


def test_token_weights_of_the_strategy_tell_lengths() -> None:
    batch = ragged(LENGTHS)
    batch["w"] = batch.pop("attention_mask") * 0.5
    assert shapes(batch, PerToken(mask="w")) == LENGTHS


def _masked_language_model() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 9, (4, 8), generator=generator)
    labels = torch.full_like(ids, -100)
    labels[0, [1, 7]] = 3
    labels[1:, [0, 2]] = 4
    return {"ids": ids, "labels": labels}


def _ends_in_a_separator() -> dict[str, Any]:
    ids = torch.randint(1, 9, (4, 8))
    ids[:, -1] = 9
    labels = ids.clone()
    labels[:, -1] = -100
    return {"ids": ids, "labels": labels}


def _last_turn_ignored() -> dict[str, Any]:
    batch = ragged(LENGTHS)
    del batch["attention_mask"]
    batch["labels"][0, 3:5] = -100  # ids are text there
    return batch


def _no_other_tensor() -> dict[str, Any]:
    labels = ragged(LENGTHS)["labels"]
    return {"ids": torch.zeros(4, 9, 1), "labels": labels}


@pytest.mark.parametrize(
    "make",
    [
        _masked_language_model,
        _ends_in_a_separator,
        _last_turn_ignored,
        _no_other_tensor,
    ],
)
def test_ignored_labels_that_are_no_padding_are_kept(make: Any) -> None:
    batch = make()
    full = batch["ids"].shape[1]
    assert shapes(batch, PerToken()) == [full] * 4
    labels = batch["labels"].shape[1]
    assert shapes(batch, PerToken(), field="labels") == [labels] * 4
    # A budget counts them as full, so that it is kept.
    micros = Cutter(MicroBatching(tokens=2 * labels), PerToken()).cut(batch)
    assert [micro.padded for micro in micros] == [2 * labels] * 2


def test_row_without_labels_is_full() -> None:
    batch = ragged(LENGTHS)
    del batch["attention_mask"]
    batch["labels"][1] = -100
    assert shapes(batch, PerToken()) == [5, 7, 7, 1]


def test_named_labels_are_trusted_where_their_padding_is_constant() -> None:
    batch = ragged(LENGTHS)
    del batch["attention_mask"]
    batch["labels"][1, 0] = -100
    assert shapes(batch, PerToken(), lengths="labels") == LENGTHS
    batch = {"ids": torch.arange(28).view(4, 7), "labels": batch["labels"]}
    with pytest.warns(UserWarning, match="field 'ids' holds values where"):
        assert shapes(batch, PerToken(), lengths="labels") == [7] * 4


def test_lengths_that_fit_two_tensors_in_mid_training_trim_nothing() -> None:
    cutter = Cutter(MicroBatching(size=1, lengths="n"), Uniform())
    numbers = torch.tensor([5, 2, 3])
    same = {"ids": torch.zeros(3, 5), "targets": torch.zeros(3, 5), "n": numbers}
    assert [m.batch["targets"].shape[1] for m in cutter.cut(same)] == [5, 3, 2]
    other = {"ids": torch.zeros(3, 8), "targets": torch.zeros(3, 6), "n": numbers}
    with pytest.warns(UserWarning, match="lengths 'n' fit several tensors"):
        micros = cutter.cut(other)
    assert [m.batch["ids"].shape[1] for m in micros] == [8] * 3
    assert [m.padded for m in micros] == [14] * 3
    with pytest.raises(TrainkitError, match=r"found are \[6, 8\]"):
        Cutter(MicroBatching(size=1, lengths="n"), Uniform()).cut(other)


@pytest.mark.parametrize(
    ("lengths", "text"),
    [
        ("nothing", r"path 'nothing': the batch has nothing at 'nothing'"),
        ("one", r"lengths 'one': must lead to a mask or to integers.*float32\[\]"),
        ("words", r"lengths 'words': must lead to a mask.*list\(str"),
        ("added", r"lengths 'added': a mask has 0 for padding.*numbers below 0"),
        ("halves", r"lengths 'halves': lengths must be whole numbers.*0\.5"),
        ("below", r"lengths 'below': lengths must be whole.*\[-1"),
        ("flags", r"lengths 'flags': lengths must be whole.*bool\[4\]"),
        ("long", r"lengths 'long': the longest row has 9 columns.*found are \[7\]"),
    ],
)
def test_lengths_that_are_none_are_refused(lengths: str, text: str) -> None:
    mask = mask_of(LENGTHS)
    batch = {
        "ids": mask,
        "one": torch.tensor(1.0),
        "words": list("abcd"),
        "added": (mask - 1.0) * 1e9,
        "halves": torch.full((4,), 0.5),
        "below": torch.tensor([-1, 2, 3, 4]),
        "flags": torch.ones(4, dtype=torch.bool),
        "long": torch.tensor([9, 1, 1, 1]),
    }
    used = {name: batch[name] for name in {"ids", lengths} & set(batch)}
    with pytest.raises(TrainkitError, match=text):
        shapes(used, Uniform(), lengths=lengths)


def test_mask_that_is_added_is_not_taken_for_an_attention_mask() -> None:
    mask = mask_of(LENGTHS)
    batch = {"ids": mask, "attention_mask": (mask - 1.0) * 1e9}
    assert shapes(batch, Uniform()) == [7] * 4


def test_attention_mask_that_no_other_tensor_matches_is_not_trimmed() -> None:
    mask = mask_of(LENGTHS)  # also of a prefix of two that the model puts before ids
    batch = {"ids": torch.zeros(4, 5), "attention_mask": mask}
    assert shapes(batch, Uniform(), field="attention_mask") == [7] * 4
    assert shapes(batch, Uniform()) == [5] * 4


def test_lengths_of_another_number_of_rows_are_refused() -> None:
    batch = {"ids": mask_of(LENGTHS), "mask": mask_of(LENGTHS), "n": [1, 2, 3]}
    with pytest.raises(TrainkitError, match=r"lengths 'n': .*the 4 rows.*has 3"):
        shapes(batch, Uniform(), lengths=("mask", "n"))
