"""Ragged samples become a batch, and what was filled up can be told."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence

from trainkit import PadCollate, PerToken, TrainkitError


def samples(*lengths: int) -> list[dict[str, Any]]:
    return [
        {
            "ids": torch.arange(1, length + 1),
            "labels": list(range(length)),
            "weight": 0.5,
            "name": f"row {length}",
        }
        for length in lengths
    ]


def test_fields_of_every_kind() -> None:
    batch = PadCollate({"labels": -100}, mask="mask")(samples(3, 1))
    assert batch["ids"].tolist() == [[1, 2, 3], [1, 0, 0]]
    assert batch["labels"].tolist() == [[0, 1, 2], [0, -100, -100]]
    assert batch["weight"].tolist() == [0.5, 0.5]
    assert batch["name"] == ["row 3", "row 1"]
    assert batch["mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6))
@settings(max_examples=50)
def test_right_equals_torchs_pad_sequence(lengths: list[int]) -> None:
    rows = [torch.arange(length) for length in lengths]
    reference = pad_sequence(rows, batch_first=True, padding_value=7)
    assert torch.equal(PadCollate({0: 7})(rows), reference)
    left = PadCollate({0: 7}, side="left")([row.flip(0) for row in rows])
    assert torch.equal(left.flip(1), reference)


class Pair(NamedTuple):
    x: Any
    y: Any


def test_samples_keep_their_form() -> None:
    x, y = torch.ones(2), torch.ones(3)
    as_tuple = PadCollate({1: -1})([(x, y), (y, x)])
    assert isinstance(as_tuple, tuple)
    assert as_tuple[1].tolist() == [[1, 1, 1], [1, 1, -1]]
    as_list = PadCollate()([[x, "a"], [y, "b"]])
    assert isinstance(as_list, list)
    assert as_list[1] == ["a", "b"]
    named = PadCollate()([Pair([1], "a"), Pair([2, 3], "b")])
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
    batch = PadCollate(mask="mask", multiple_of=4)(rows)
    assert batch["target"].shape == (2, 8)
    assert batch["source"].shape == (2, 4)
    assert batch["image"].shape == (2, 3, 4)
    assert batch["mask"].sum(1).tolist() == [5, 1]


@pytest.mark.parametrize("side", ["right", "left"])
def test_multiple_of_goes_for_all_fields_that_are_as_long(side: Any) -> None:
    pad = PadCollate({"labels": -100}, side=side, multiple_of=8, mask="mask")
    batch = pad(samples(3, 9))
    assert {batch[name].shape for name in ("ids", "labels", "mask")} == {(2, 16)}
    assert batch["mask"].sum(1).tolist() == [3, 9]
    assert torch.equal(batch["mask"].bool(), batch["ids"] > 0)
    assert PerToken().weight(batch) == 12  # padding weighs nothing


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


@pytest.mark.parametrize(
    ("pad", "rows", "text"),
    [
        (
            PadCollate(),
            [{"x": torch.ones(2)}, {"x": torch.ones(2, 1)}],
            r"field 'x' must have as many dimensions .* \(2, 1\), \(2,\)",
        ),
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
    with pytest.raises(TrainkitError, match='side: must be "right" or "left", .*top'):
        PadCollate(side="top")  # type: ignore[arg-type]
    with pytest.raises(TrainkitError, match="multiple_of: must be a whole number from"):
        PadCollate(multiple_of=0)
    with pytest.raises(TrainkitError, match="fill: must be a dict, .* received -100"):
        PadCollate(-100)  # type: ignore[arg-type]
