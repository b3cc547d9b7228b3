"""Micro-batches filled up to few shapes with what weighs nothing; loader batches joined
as the collate function would have made them one."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.core.split.common import DISTRIBUTIONS, Side, mask_of, ragged, window
from trainkit import (
    MicroBatching,
    PackCollate,
    PadCollate,
    PerSample,
    PerToken,
    TrainkitError,
)
from trainkit.core.split.cutting import Cutter, Limit
from trainkit.core.split.filling import shapes_of
from trainkit.core.terms import ONE

LABELS = {ONE: PerToken()}
FEW = {
    "a number": MicroBatching(tokens=2048, shapes=3),
    "widths": MicroBatching(tokens=2048, shapes=(1024, 512, 256, 128)),
    "rows as well": MicroBatching(tokens=2048, size=5, shapes=(1024, 300)),
    "one": MicroBatching(tokens=2048, shapes=(1024,)),
}


@pytest.mark.parametrize("side", ["right", "left", "mixed"])
@pytest.mark.parametrize("options", FEW.values(), ids=FEW)
def test_every_micro_batch_has_one_of_few_shapes(options: Any, side: Side) -> None:
    """Each row is in one of them, whole; what fills it counts nothing."""
    cutter = Cutter(options, PerToken(), LABELS)
    for number, name in enumerate(DISTRIBUTIONS):
        lengths = window(name, random.Random(number))
        batch = ragged(lengths, side=side)
        micros = cutter.cut(batch)
        assert sorted(row for each in micros for row in each.rows) == [*range(64)]
        assert sum(each.real for each in micros) == sum(lengths)
        for each in micros:
            shape = tuple(each.batch["ids"].shape)
            assert shape in shapes_of(options)
            assert each.padded == shape[0] * shape[1] <= 2048
            assert each.num_fillers == shape[0] - len(each.rows)
            assert {tuple(v.shape) for v in each.batch.values()} == {shape}
            assert (each.batch["labels"][len(each.rows) :] == -100).all()
            pads = each.batch["attention_mask"] == 0
            assert (each.batch["ids"][pads] == 0).all()
            assert (each.batch["labels"][pads] == -100).all()
            for row, place in enumerate(each.rows):
                kept = each.batch["attention_mask"][row] != 0
                own = batch["attention_mask"][place] != 0
                for name_of, value in each.batch.items():
                    assert torch.equal(value[row][kept], batch[name_of][place][own])


def test_a_column_that_fills_has_what_the_field_has_where_it_pads() -> None:
    """Or, where nothing pads in the loader batch: 0, and an ignored label."""
    cutter = Cutter(MicroBatching(tokens=24, shapes=(8,)), PerToken(), LABELS)
    mask = mask_of([4, 2], padded_length=6)
    state = torch.rand(2, 6, 3)
    state[mask == 0] = torch.tensor([1.0, 2.0, 3.0])
    ids = torch.full((2, 6), 7).where(mask != 0, 9)
    rest = {"labels": ids.where(mask != 0, -100), "note": ["a", "b"]}
    batch = {"ids": ids, "attention_mask": mask, "state": state, **rest}
    (micro,) = cutter.cut(batch)
    assert micro.batch["ids"].tolist() == [[7] * 4 + [9] * 4] + [[7, 7] + [9] * 6] * 2
    assert micro.batch["state"][:, 4:].unique(dim=1).tolist() == [[[1, 2, 3]]] * 3
    assert micro.batch["note"] == ["a", "b", "b"]
    assert micro.batch["labels"][2].tolist() == [-100] * 8
    assert micro.batch["attention_mask"].sum(1).tolist() == [4, 2, 2]
    full = ragged([6, 6])
    (micro,) = cutter.cut({**full, "other_labels": full["ids"]})
    assert not micro.batch["ids"][:, 6:].any()
    assert not micro.batch["attention_mask"][:, 6:].any()
    for name in ("labels", "other_labels"):
        assert (micro.batch[name][:, 6:] == -100).all()


def test_a_limit_that_is_tried_has_no_shapes() -> None:
    cutter = Cutter(MicroBatching(tokens=64, shapes=2), PerToken(), LABELS)
    micros = cutter.cut(ragged([4, 3, 2]), Limit(2, None))
    assert [tuple(each.batch["ids"].shape) for each in micros] == [(2, 3), (1, 4)]


def documents(*lengths: int, **options: Any) -> dict[str, Any]:
    return PackCollate(**options)([{"input_ids": [*range(3, 3 + n)]} for n in lengths])


@pytest.mark.parametrize("strategy", [PerToken(shift=True), PerSample()])
def test_a_document_that_counts_nothing_fills_a_flattened_row(strategy: Any) -> None:
    """It is as `PackCollate(lengths=)` makes it: no field has a size that depends on
    how many documents there are."""
    cutter = Cutter(MicroBatching(tokens=16, shapes=3), PerToken(), LABELS)
    batch = {**documents(7, 5, 3, 2, 6, 4), "weight": torch.arange(6)}
    micros = cutter.cut(batch)
    fields = {"input_ids", "labels", "position_ids", "seq_idx", "weight"}
    assert [each.rows for each in micros] == [[0, 2, 4], [1, 3, 5]]
    weights = [float(strategy.weight(each.batch)) for each in micros]
    assert sum(weights) == float(strategy.weight(batch))
    (small,) = cutter.cut(documents(3, 2))
    for each, number in ((micros[0], 16), (micros[1], 16), (small, 8)):
        assert {*each.batch} == fields - ({"weight"} if each is small else set())
        assert each.batch["input_ids"].shape == (1, number)
        assert each.padded == number
        assert each.num_fillers == 0
    assert small.batch["labels"].tolist() == [[-100, 4, 5, -100, 4, *[-100] * 3]]
    assert small.batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 0, 0]]
    assert small.batch["seq_idx"].tolist() == [[0, 0, 0, 1, 1, 2, 2, 2]]


def test_what_no_shape_holds_is_refused() -> None:
    cutter = Cutter(MicroBatching(tokens=64, shapes=(8, 4)), PerToken(), LABELS)
    text = r"row 1 .* has 9 tokens, and the widest of the 2 shapes has 8.*shapes=\(9, "
    with pytest.raises(TrainkitError, match=text):
        cutter.cut(ragged([3, 9, 4]))
    with pytest.raises(TrainkitError, match="row 0 of the loader batch has 20 tokens"):
        cutter.cut(documents(20, 2))


def test_fields_that_cannot_be_filled_are_refused() -> None:
    options = MicroBatching(tokens=64, shapes=(8, 4), lengths=["a", "b"])
    pair = {"a": mask_of([3, 2]), "b": mask_of([1, 2])}
    with pytest.raises(TrainkitError, match="must have one length each.*has 2"):
        Cutter(options, PerSample()).cut(pair)
    cutter = Cutter(MicroBatching(tokens=64, shapes=1), PerToken(), LABELS)
    arrays = {**ragged([3, 2]), "x": ragged([3, 2])["ids"].numpy()}
    with pytest.raises(TrainkitError, match="field 'x' must be a tensor.*ndarray"):
        cutter.cut(arrays)
    flat = documents(3, 2)
    blocks = (flat["seq_idx"][0][:, None] == flat["seq_idx"][0]).tril()[None, None]
    with pytest.raises(TrainkitError, match=r"mask of blocks, bool\[1, 1, 5, 5\]"):
        cutter.cut({**flat, "attention_mask": blocks})
    alone = {k: v for k, v in flat.items() if "idx" not in k and "position" not in k}
    with pytest.raises(TrainkitError, match="told apart by a field.*'cu_seq_lens_q'"):
        cutter.cut(alone)
    named = MicroBatching(tokens=64, shapes=1, documents="own")
    with pytest.raises(TrainkitError, match="told apart by a field.*'own'"):
        Cutter(named, PerToken(), LABELS).cut({**flat, "own": flat["seq_idx"]})


@pytest.mark.parametrize("lengths", [[4, 6], [6]])
def test_documents_that_a_mask_numbers_are_filled(lengths: list[int]) -> None:
    """Also where one of them is alone."""
    cutter = Cutter(MicroBatching(tokens=8, shapes=1), PerToken(), LABELS)
    flat = documents(*lengths, 5)
    batch = {name: flat[name] for name in ("input_ids", "labels")}
    batch["attention_mask"] = flat["seq_idx"] + 1
    for each in cutter.cut(batch):
        (own,) = (lengths + [5])[each.rows[0] :][:1]
        first = int(each.batch["attention_mask"][0, 0])
        numbers = [first] * own + [first + 1] * (8 - own)
        assert each.batch["attention_mask"].tolist() == [numbers]


# ---- loader batches that are joined --------------------------------------------------

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


def test_a_token_behind_the_last_label_is_no_padding() -> None:
    """Labels alone tell lengths here, and each row ends with a token that has none."""
    rows, wide = [[5, 6, 7], [8, 9, 4]], torch.tensor([[1, 2, 3, 4]])
    labels = torch.tensor([[5, 6, -100], [8, -100, -100]])
    batch = {"ids": torch.tensor(rows), "labels": labels}
    found = join([batch, {"ids": wide, "labels": wide}])
    assert found["ids"].tolist() == [[*rows[0], 0], [*rows[1], 0], [1, 2, 3, 4]]


@pytest.mark.parametrize("trim", [True, False])
def test_a_pool_is_padded_with_what_its_fields_have_where_they_pad(trim: bool) -> None:
    batches = [
        {"ids": ids, "attention_mask": (ids != 9).long(), "targets": -ids}
        for ids in (torch.tensor([[5, 6, 7], [8, 9, 9]]), torch.tensor([[1, 2, 3, 4]]))
    ]
    cutter = Cutter(MicroBatching(size=2, pool=2, trim=trim), PerSample())
    found = cutter.join(batches)
    assert found["ids"].tolist() == [[5, 6, 7, 9], [8, 9, 9, 9], [1, 2, 3, 4]]
    assert found["targets"].tolist() == (-found["ids"]).tolist()
    assert found["attention_mask"].tolist() == (found["ids"] != 9).long().tolist()


def test_lists_of_samples_become_one() -> None:
    assert join([[1, 2], [3]], collate=list) == [1, 2, 3]


BATCH = ragged([3, 2])
FLAT = PackCollate()([{"input_ids": [3, 4]}, {"input_ids": [5, 6, 7]}])
ARRAYS = {**BATCH, "x": BATCH["ids"].numpy()}


def with_(**more: Any) -> dict[str, Any]:
    return {**BATCH, **more}


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (BATCH, with_(x=1), r"\['x'\] is not alike"),
        (with_(n=3), with_(n=4), "'n' is not alike.*what rows share is equal"),
        (with_(x=torch.zeros(5)), with_(x=torch.ones(5)), "'x' is not alike"),
        (with_(x=torch.zeros(2, 7)), with_(x=torch.zeros(2, 8)), "'x' is not alike"),
        (with_(x=torch.zeros(2)), with_(x=torch.zeros(3)), "'x' is not alike"),
        (ARRAYS, ARRAYS, "'x' is not alike.*x: ndarray"),
        *[(each, FLAT, r"no padding .*batches=2\)") for each in (BATCH, FLAT)],
    ],
    ids="fields number table width rows arrays documents flattened".split(),
)
def test_batches_that_are_unlike_are_refused(
    first: Any, second: Any, text: str
) -> None:
    with pytest.raises(TrainkitError, match=f"pool: .*{text}"):
        join([first, second])
