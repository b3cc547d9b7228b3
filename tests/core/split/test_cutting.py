"""Each row is in one micro-batch; the first is the largest."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.core.split.common import DISTRIBUTIONS, mask_of, ragged, window
from trainkit import PerSample, PerToken, TrainkitError, Uniform
from trainkit.core.split.cutting import Cutter, Limit, MicroBatch
from trainkit.core.split.micro_batching import MicroBatching


def rows_of(micros: list[MicroBatch]) -> list[int]:
    return sorted(row for micro in micros for row in micro.rows)


@pytest.mark.parametrize(
    ("num_rows", "size", "sizes"),
    [
        (10, 4, [4, 3, 3]),
        (8, 4, [4, 4]),
        (9, 4, [3, 3, 3]),
        (3, 4, [3]),
        (1, 1, [1]),
        (5, 1, [1] * 5),
        (0, 4, [0]),
    ],
)
def test_rows_without_lengths_keep_their_order(
    num_rows: int, size: int, sizes: list[int]
) -> None:
    batch = {"x": torch.arange(float(num_rows))}
    micros = Cutter(MicroBatching(size=size), Uniform()).cut(batch)
    assert [len(micro.rows) for micro in micros] == sizes
    assert [micro.padded for micro in micros] == [micro.real for micro in micros]
    assert [micro.padded for micro in micros] == sizes
    assert torch.equal(torch.cat([micro.batch["x"] for micro in micros]), batch["x"])


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize(
    "options",
    [{"tokens": 2048}, {"size": 8}, {"tokens": 2048, "size": 5}, {}],
    ids=str,
)
def test_every_row_is_in_one_micro_batch_and_the_first_is_the_largest(
    name: str, options: dict[str, int]
) -> None:
    lengths = window(name, random.Random(4))
    batch = ragged(lengths)
    micros = Cutter(MicroBatching(**options), PerToken()).cut(batch)  # type: ignore[arg-type]
    assert rows_of(micros) == list(range(64))
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
            assert torch.equal(micro.batch[field], whole[micro.rows, :longest])
            assert micro.batch[field].is_contiguous()


def test_limit_replaces_that_of_the_options() -> None:
    batch = ragged([9, 9, 9, 9, 2, 2])
    cutter = Cutter(MicroBatching(), PerToken())
    assert len(cutter.cut(batch)) == 1
    assert len(cutter.cut(batch, Limit(tokens=18))) == 3
    assert len(cutter.cut(batch, Limit(size=1))) == 6
    assert len(cutter.cut(batch, Limit(size=1, tokens=10**6))) == 6


def test_rows_of_one_length_are_cut_evenly_in_their_order() -> None:
    batch = ragged([7] * 10)
    for options in (MicroBatching(size=4), MicroBatching(tokens=30)):
        micros = Cutter(options, PerToken()).cut(batch)
        assert [len(micro.rows) for micro in micros] == [4, 3, 3]
        assert [row for micro in micros for row in micro.rows] == list(range(10))


def test_at_least_halves_the_largest() -> None:
    batch = ragged([16, 16, 8, 8, 2, 1])
    cutter = Cutter(MicroBatching(), PerToken())
    for number in range(1, 7):
        micros = cutter.cut(batch, at_least=number)
        assert len(micros) == number
        assert rows_of(micros) == list(range(6))
        sizes = [micro.padded for micro in micros]
        assert sizes == sorted(sizes, reverse=True)
    assert len(cutter.cut(batch, at_least=50)) == 6  # there are no more rows
    halves = cutter.cut(batch, at_least=2)
    assert [micro.rows for micro in halves] == [[0, 1, 2], [3, 4, 5]]
    without_lengths = Cutter(MicroBatching(size=4), Uniform())
    micros = without_lengths.cut(torch.zeros(10, 2), at_least=4)
    assert [len(micro.rows) for micro in micros] == [3, 3, 2, 2]


def test_row_over_the_budget_is_alone_and_said() -> None:
    cutter = Cutter(MicroBatching(tokens=10), PerToken())
    first, *rest = cutter.cut(ragged([3, 50, 3]))
    assert (first.rows, first.padded) == ([1], 50)
    assert [micro.rows for micro in rest] == [[0, 2]]
    assert cutter.longest_over_budget == 50
    cutter.cut(ragged([3, 3]))
    assert cutter.longest_over_budget is None


def test_measure_is_what_the_uncut_batch_computes() -> None:
    rows = Cutter(MicroBatching(), PerToken()).measure(ragged([3, 5, 2]))
    assert (rows.num_rows, rows.padded, rows.has_lengths) == (3, 15, True)
    rows = Cutter(MicroBatching(), PerSample()).measure(torch.zeros(4, 9))
    assert (rows.num_rows, rows.padded, rows.has_lengths) == (4, 4, False)


def test_empty_batch_is_one_micro_batch_without_rows() -> None:
    batch = {"ids": torch.zeros(0, 5), "attention_mask": torch.zeros(0, 5)}
    (micro,) = Cutter(MicroBatching(tokens=9), PerToken()).cut(batch)
    assert (micro.rows, micro.padded, micro.real) == ([], 0, 0)
    assert micro.batch["ids"].shape == (0, 5)


def test_tokens_without_lengths_are_refused_with_the_structure() -> None:
    text = r"tokens=64: .*nothing in the batch tells them: dict\(x: float32\[4, 9\]\)"
    with pytest.raises(TrainkitError, match=text):
        Cutter(MicroBatching(tokens=64), PerSample()).cut({"x": torch.zeros(4, 9)})


def test_images_with_maps_of_labels_are_cut_by_size() -> None:
    labels = torch.zeros(6, 8, 8, dtype=torch.long)
    labels[1:, 4:] = -100  # ignored below, which is no padding
    batch = (torch.randn(6, 3, 8, 8), labels)
    micros = Cutter(MicroBatching(size=3), PerToken(labels=1)).cut(batch)
    assert [tuple(micro.batch[1].shape) for micro in micros] == [(3, 8, 8)] * 2
    assert [micro.padded for micro in micros] == [3, 3]


def test_several_ragged_groups_are_trimmed_each_by_its_own() -> None:
    encoder, decoder = [9, 3, 9, 2], [2, 7, 2, 6]
    batch: dict[str, Any] = {
        "ids": mask_of(encoder) * 5,
        "mask": mask_of(encoder),
        "decoder": {"ids": mask_of(decoder) * 5, "mask": mask_of(decoder)},
    }
    options = MicroBatching(tokens=22, overhead=3, lengths=("mask", "decoder.mask"))
    first, second = Cutter(options, Uniform()).cut(batch)
    assert (first.rows, first.padded, first.real) == ([0, 2], 22, 22)
    assert (second.rows, second.padded, second.real) == ([1, 3], 20, 18)
    assert first.batch["ids"].shape == (2, 9)
    assert first.batch["decoder"]["ids"].shape == (2, 2)
    assert second.batch["mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert second.batch["decoder"]["mask"].shape == (2, 7)


def test_groups_of_one_padded_length_lose_what_is_padding_in_both() -> None:
    encoder, decoder = [9, 3, 1], [1, 5, 9]
    batch = {"e": mask_of(encoder), "d": mask_of(decoder)}
    options = MicroBatching(size=1, lengths=("e", "d"))
    micros = {m.rows[0]: m for m in Cutter(options, Uniform()).cut(batch)}
    assert micros[1].batch["e"].shape == micros[1].batch["d"].shape == (1, 5)
    assert micros[1].padded == 10


def test_a_list_that_may_be_fields_or_rows_is_refused() -> None:
    """Two pictures with two boxes each look like two fields of two rows."""
    boxes = {"image": torch.zeros(2, 3, 4, 4), "boxes": [torch.ones(2, 4)] * 2}
    cutter = Cutter(MicroBatching(size=1), PerSample(size="image"))
    with pytest.raises(TrainkitError, match="'boxes' is a list of 2 tensors of 2 rows"):
        cutter.cut(boxes)
