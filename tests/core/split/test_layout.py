"""How long rows are and what is trimmed, by the declared rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.core.split.common import Side, mask_of, ragged
from trainkit import PerSample, PerToken, TrainkitError, Uniform
from trainkit.core.split.cutting import Cutter
from trainkit.core.split.micro_batching import MicroBatching

LENGTHS = [5, 2, 7, 1]
FULL = [7] * 4
MASK = mask_of(LENGTHS)
RAGGED = ragged(LENGTHS)
LABELS = {"ids": RAGGED["ids"], "labels": RAGGED["labels"]}


def cut(batch: Any, strategy: Any = None, **options: Any) -> list[Any]:
    """The batches of one row each, in the order of the rows."""
    cutter = Cutter(MicroBatching(**{"size": 1, **options}), strategy or PerToken())
    return [m.batch for m in sorted(cutter.cut(batch), key=lambda micro: micro.rows)]


def columns(batches: list[Any], field: str = "ids") -> list[int]:
    return [batch[field].shape[1] for batch in batches]


def without(labels: torch.Tensor, rows: Any, to: Any = slice(None)) -> torch.Tensor:
    """Labels of which some do not count."""
    labels = labels.clone()
    labels[rows, to] = -100
    return labels


# ---- lengths -------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["right", "left", "mixed"])
@pytest.mark.parametrize("strategy", [PerToken(), Uniform()], ids=str)
def test_attention_mask_tells_lengths(side: Side, strategy: Any) -> None:
    mask = mask_of(LENGTHS, side=side)
    for kind in (mask, mask.bool(), mask * 0.5):
        batch = {**ragged(LENGTHS, side=side), "attention_mask": kind}
        for row, part in enumerate(cut(batch, strategy)):
            assert part["attention_mask"].bool().all()
            assert torch.equal(part["ids"][0], batch["ids"][row][mask[row].bool()])


INSIDE = torch.tensor([[0, 1, 0, 1, 0], [0, 0, 0, 0, 0]])
OTHER = ragged([2, 6, 7, 3])["labels"]
NARROW = OTHER[:, :6]


@pytest.mark.parametrize(
    ("batch", "strategy", "options", "found"),
    [
        # A mask of another name has to be named.
        ({"ids": MASK, "m": MASK}, Uniform(), {}, FULL),
        ({"ids": MASK, "m": MASK}, Uniform(), {"lengths": "m"}, LENGTHS),
        # Masked inside is kept, and a row of nothing has one column.
        ({"ids": INSIDE, "attention_mask": INSIDE}, Uniform(), {}, [3, 1]),
        ({"ids": INSIDE, "m": INSIDE[..., None].expand(-1, -1, 3)}, Uniform(),
         {"lengths": "m"}, [3, 1]),
        ({"ids": MASK, "attention_mask": (MASK - 1.0) * 1e9}, Uniform(), {}, FULL),
        # Labels, where there is no mask: what is before them is a prompt, and a row
        # without any can be of any length.
        (LABELS, PerToken(), {}, LENGTHS),
        (LABELS, PerToken(), {"lengths": "labels"}, LENGTHS),
        ({**LABELS, "labels": without(LABELS["labels"], 2, slice(4))}, PerToken(), {},
         LENGTHS),
        ({**LABELS, "labels": without(LABELS["labels"], 1)}, PerToken(), {},
         [5, 7, 7, 1]),
        (LABELS, Uniform(), {}, FULL),
        ({"ids": MASK, "w": MASK * 0.5}, PerToken(mask="w"), {}, LENGTHS),
        # Labels that a mask of their width leaves out are kept.
        ({**RAGGED, "labels": OTHER}, PerToken(), {}, [5, 6, 7, 3]),
        ({**RAGGED, "labels": OTHER}, PerToken(), {"lengths": "attention_mask"},
         [5, 6, 7, 3]),
        ({**RAGGED, "labels": OTHER}, Uniform(), {}, LENGTHS),
        ({**RAGGED, "labels": without(OTHER, [1, 2, 3])}, PerToken(), {}, LENGTHS),
        # Labels of another width are no part of it; a map of labels is no sequence.
        ({"ids": NARROW, "labels": NARROW, "attention_mask": MASK}, PerToken(), {},
         [6] * 4),
        ({"ids": MASK, "labels": MASK[..., None].expand(-1, -1, 3) - 100}, PerToken(),
         {}, FULL),
        # A mask that has other rows than the batch tells nothing if nobody named it.
        ({"ids": MASK, "attention_mask": mask_of([3, 7])}, PerSample(size="ids"), {},
         FULL),
    ],
)  # fmt: skip
def test_lengths(batch: Any, strategy: Any, options: Any, found: list[int]) -> None:
    assert columns(cut(batch, strategy, **options)) == found


@pytest.mark.parametrize("strategy", [Uniform(), PerToken("decoder.m")])
def test_several_masks_are_trimmed_each_by_its_own(strategy: Any) -> None:
    """One of them may be the strategy's labels."""
    encoder, decoder = mask_of([9, 3, 9, 2]), mask_of([2, 7, 2, 6])
    tells = 100 * (decoder - 1) if isinstance(strategy, PerToken) else decoder
    batch = {"ids": encoder, "mask": encoder, "decoder": {"ids": decoder, "m": tells}}
    options = MicroBatching(tokens=22, lengths=("mask", "decoder.m"))
    first, second = Cutter(options, strategy).cut(batch)
    assert (first.rows, first.padded, first.real) == ([0, 2], 22, 22)
    assert (second.rows, second.padded, second.real) == ([1, 3], 20, 18)
    assert first.batch["ids"].shape == (2, 9)
    assert first.batch["decoder"]["ids"].shape == (2, 2)
    assert second.batch["mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert second.batch["decoder"]["m"].shape == (2, 7)


@pytest.mark.parametrize("named", [{}, {"lengths": "attention_mask"}])
def test_token_weights_beside_a_mask_are_of_the_same_tokens(named: Any) -> None:
    batch = {"ids": MASK, "attention_mask": MASK, "w": MASK * 0.5}
    cutter = Cutter(MicroBatching(size=4, **named), PerToken(mask="w"))
    assert cutter.read(batch).rows.padded == MASK.numel()


def test_masks_of_one_width_lose_what_is_padding_in_both() -> None:
    batch = {"e": mask_of([9, 3, 1]), "d": mask_of([1, 5, 9])}
    options = MicroBatching(size=1, lengths=("e", "d"))
    micros = {m.rows[0]: m for m in Cutter(options, Uniform()).cut(batch)}
    assert micros[1].batch["e"].shape == micros[1].batch["d"].shape == (1, 5)
    assert micros[1].padded == 10


@pytest.mark.parametrize(
    ("lengths", "text"),
    [
        ("nothing", r"path 'nothing': the batch has nothing at 'nothing'"),
        ("one", r"lengths 'one': must be the path of a mask.*float32\[\]"),
        ("words", r"lengths 'words': must be the path of a mask.*list\(str"),
        ("added", r"lengths 'added': must be the path of a mask, .*0 for padding"),
        ("numbers", r"lengths 'numbers': .*torch.arange\(longest\) < lengths"),
        (("mask", "other"), r"lengths 'other': .*the 4 rows.*leads to float32\[3, 7\]"),
    ],
)
def test_lengths_that_are_none_are_refused(lengths: Any, text: str) -> None:
    batch = {"ids": MASK, "mask": MASK, "other": torch.ones(3, 7)}
    batch |= {"one": torch.tensor(1.0), "words": list("abcd")}
    batch |= {"added": (MASK - 1.0) * 1e9, "numbers": torch.tensor(LENGTHS)}
    with pytest.raises(TrainkitError, match=text):
        cut(batch, Uniform(), lengths=lengths)


# ---- samples that are collated after the cut -----------------------------------------


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda n: {"a": torch.zeros(n, 3), "b": torch.zeros(9)}, "a"),
        (lambda n: {"ids": [1] * n, "label": 0}, "ids"),
        (lambda n: {"n": n, "x": torch.zeros(9)}, "n"),
        (lambda n: {"n": torch.tensor(n)}, "n"),
        (lambda n: {"n": float(n)}, "n"),
        (lambda n: ({"ids": "abcde"[:n]}, torch.zeros(9)), "0.ids"),
    ],
)
def test_lengths_of_samples(make: Any, path: Any) -> None:
    """So that nothing is padded twice; a sample of nothing counts as one token."""
    options = MicroBatching(tokens=6, collate=tuple, lengths=path)
    samples = list(map(make, (3, 5, 2, 3, 0)))
    cutter = Cutter(options, PerSample())
    cutter.trim = False  # which is for padded batches
    micros = cutter.cut(samples)
    assert [m.rows for m in micros] == [[0, 3], [1], [2, 4]]
    assert [(m.padded, m.real) for m in micros] == [(6, 6), (5, 5), (4, 3)]
    assert micros[0].batch[1] is samples[3]
    assert cutter.read(samples).rows.padded == 25


@pytest.mark.parametrize(
    ("samples", "options", "text"),
    [
        (torch.zeros(4), {"size": 2}, r"collate: is for a loader.*float32\[4\]"),
        ((torch.ones(4), torch.ones(4)), {"size": 2}, "Give the loader collate_fn"),
        ([[1], [2]], {"tokens": 2}, r"needs .*lengths='path.to.mask'"),
        *[
            ([{"n": 3}, {"n": value}], {"size": 2, "lengths": "n"},
             r"lengths 'n': .* in sample 1, dict\(n:")
            for value in (-1, 2.5, None, True)
        ],
    ],
)  # fmt: skip
def test_samples_that_tell_no_lengths(samples: Any, options: Any, text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        Cutter(MicroBatching(collate=list, **options), PerSample()).cut(samples)
    plain = Cutter(MicroBatching(collate=list, size=2), PerSample())
    assert [micro.batch for micro in plain.cut([1, 2, 3])] == [[1, 2], [3]]


# ---- columns -------------------------------------------------------------------------

VALUES: dict[str, Any] = {
    "expanded": torch.arange(7).expand(4, 7),
    "deep": torch.randn(4, 7, 3),
    "array": RAGGED["ids"].numpy(),
    "features": torch.randn(4, 6),
    "weight": torch.randn(4),
    "mask4d": torch.randn(4, 1, 7, 7),
}


@pytest.mark.parametrize(
    ("name", "options", "shapes"),
    [
        ("expanded", {}, [(n,) for n in LENGTHS]),
        ("deep", {}, [(n, 3) for n in LENGTHS]),
        ("array", {}, [(n,) for n in LENGTHS]),
        ("features", {}, [(6,)] * 4),
        ("weight", {}, [()] * 4),
        ("mask4d", {}, [(1, 7, 7)] * 4),
        ("deep", {"trim": False}, [(7, 3)] * 4),
    ],
)
def test_what_is_as_wide_as_the_mask_is_trimmed(
    name: str, options: Any, shapes: Any
) -> None:
    value = VALUES[name]
    found = [part["v"] for part in cut({**RAGGED, "v": value}, **options)]
    assert [tuple(each.shape[1:]) for each in found] == shapes
    for row, each in enumerate(found):
        assert type(each) is type(value)
        kept = value[row : row + 1][tuple(slice(size) for size in each.shape)]
        assert (each == kept).all()


def test_shared_field_of_as_many_rows_is_neither_cut_nor_trimmed() -> None:
    batch = {**RAGGED, "table": torch.randn(4, 7)}
    for each in cut(batch, shared=["table"]):
        assert each["table"] is batch["table"]


def test_a_field_that_once_had_another_width_is_not_trimmed_by_chance() -> None:
    cutter = Cutter(MicroBatching(size=1), PerToken())
    for lengths in (LENGTHS, [6, 2, 3, 1]):
        batch = {**ragged(lengths), "features": torch.zeros(4, 6)}
        assert columns([m.batch for m in cutter.cut(batch)], "features") == [6] * 4
    # Negative control: seen first in that batch, it looks ragged.
    assert columns(cut(batch), "features") == [6, 2, 3, 1]


def test_a_field_that_once_had_another_length_is_not_cut_by_chance() -> None:
    """Prototypes beside an epoch's last batch, which has as many rows."""
    cutter, table = Cutter(MicroBatching(size=2), PerSample(size="x")), torch.arange(4)
    for rows in (6, 4):
        batch = {"x": torch.zeros(rows, 2), "table": table}
        assert all(m.batch["table"] is table for m in cutter.cut(batch))
    # Negative control: seen first in that batch, it looks like rows.
    again = Cutter(MicroBatching(size=2), PerSample(size="x")).cut(batch)
    assert [m.batch["table"].tolist() for m in again] == [[0, 1], [2, 3]]


def test_a_field_that_no_longer_has_an_entry_for_each_row() -> None:
    """Such as the images of rows, one for each so far: whose are four of three?"""

    def read(*batches: tuple[int, int], refuses: bool) -> list[int]:
        cutter = Cutter(MicroBatching(size=1), PerToken(), refuses_others=refuses)
        found: list[Any] = []
        for rows, number in batches:
            labels = torch.ones(rows, 2, dtype=torch.long)
            found = cutter.cut({"labels": labels, "images": torch.ones(number)})
        return [len(each.batch["images"]) for each in found]

    assert read((2, 2), (3, 4), refuses=False) == [4] * 3  # the proof reads other sizes
    assert read((1, 1), (3, 4), refuses=True) == [4] * 3  # one row says nothing
    assert read((2, 2), (3, 3), refuses=True) == [1] * 3
    with pytest.raises(TrainkitError, match="'images' had .* and has 4 for 3 rows now"):
        read((2, 2), (3, 4), refuses=True)


def test_untrimmed_rows_count_as_full_in_the_budget() -> None:
    for options, trim, padded, width in (
        ({"trim": False}, True, [14, 14], 7),
        ({}, False, [14, 14], 7),
        ({}, True, [14, 4], 2),  # trimmed, more rows fit
    ):
        cutter = Cutter(MicroBatching(tokens=14, **options), PerToken())  # type: ignore[arg-type]
        cutter.trim &= trim
        micros = cutter.cut(RAGGED)
        assert [micro.padded for micro in micros] == padded
        assert micros[-1].batch["ids"].shape[1] == width


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("rows", [[0, 1], [1, 3], [2], [0, 1, 2, 3]], ids=str)
def test_some_rows_are_the_same_trimmed_and_untrimmed(rows: Any, side: Side) -> None:
    batch = {**ragged(LENGTHS, side=side), "weight": torch.arange(4.0)}
    layout = Cutter(MicroBatching(size=1), PerToken()).read(batch)
    trimmed, whole = layout.of(rows), layout.untrimmed().of(rows)
    longest = max(LENGTHS[row] for row in rows)
    kept = slice(longest) if side == "right" else slice(-longest, None)
    for name, value in batch.items():
        assert torch.equal(whole[name], value[rows])
        narrow = value[rows][..., kept] if value.ndim > 1 else value[rows]
        assert torch.equal(trimmed[name], narrow)
