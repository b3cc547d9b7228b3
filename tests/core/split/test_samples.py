"""Lists of samples are cut before they are collated, so nothing is padded twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers import pad, ragged_sequences
from trainkit import PerSample, PerToken, TrainkitError
from trainkit.core.split.cutting import Cutter
from trainkit.core.split.micro_batching import MicroBatching


def test_samples_of_like_length_are_collated_together() -> None:
    samples = ragged_sequences(16)
    lengths = [len(ids) for ids, _ in samples]
    options = MicroBatching(tokens=48, collate=pad)
    micros = Cutter(options, PerToken()).cut(samples)
    assert sorted(row for micro in micros for row in micro.rows) == list(range(16))
    for micro in micros:
        longest = max(lengths[row] for row in micro.rows)
        assert micro.batch["ids"].shape == (len(micro.rows), longest)
        assert micro.padded == micro.batch["ids"].numel() <= 48
        assert micro.real == sum(lengths[row] for row in micro.rows)
        for place, row in enumerate(micro.rows):
            ids = micro.batch["ids"][place, : lengths[row]]
            assert torch.equal(ids, samples[row][0])
    # Negative control: in order, the same number of micro-batches pads more.
    num_rows = -(-16 // len(micros))
    parts = [lengths[i : i + num_rows] for i in range(0, 16, num_rows)]
    assert sum(len(p) * max(p) for p in parts) > sum(micro.padded for micro in micros)


SAMPLES: dict[str, tuple[list[Any], Any]] = {
    "longest tensor": ([{"a": torch.zeros(n), "b": torch.zeros(1)} for n in (5, 2)], 0),
    "lists": ([{"ids": [1] * n, "label": 0} for n in (5, 2)], 0),
    "tensors": ([torch.zeros(n, 3) for n in (5, 2)], 0),
    "number": ([{"n": n, "x": torch.zeros(9)} for n in (5, 2)], "n"),
    "0-d tensor": ([{"n": torch.tensor(n)} for n in (5, 2)], "n"),
    "path": ([({"ids": "abcde"[:n]}, torch.zeros(9)) for n in (5, 2)], "0.ids"),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_length_of_a_sample(name: str) -> None:
    samples, path = SAMPLES[name]
    options = MicroBatching(tokens=1, collate=list, lengths=path or None)
    micros = Cutter(options, PerSample()).cut(samples)
    assert [micro.padded for micro in micros] == [5, 2]
    assert Cutter(options, PerSample()).measure(samples).padded == 10


def test_samples_without_a_length_are_cut_by_size() -> None:
    cutter = Cutter(MicroBatching(size=2, collate=list), PerSample())
    assert [micro.batch for micro in cutter.cut([1, 2, 3])] == [[1, 2], [3]]
    with pytest.raises(TrainkitError, match="a budget of tokens needs the rows' len"):
        Cutter(MicroBatching(tokens=2, collate=list), PerSample()).cut([1, 2, 3])


def test_batch_that_is_no_list_is_refused() -> None:
    cutter = Cutter(MicroBatching(size=2, collate=list), PerSample())
    with pytest.raises(TrainkitError, match=r"collate: is for a loader.*float32\[4\]"):
        cutter.cut(torch.zeros(4))


@pytest.mark.parametrize("value", [-1, 2.5, None])
def test_length_that_is_none_is_refused(value: Any) -> None:
    options = MicroBatching(size=2, collate=list, lengths="n")
    with pytest.raises(TrainkitError, match=r"lengths 'n': .* in sample 1, dict\(n:"):
        Cutter(options, PerSample()).cut([{"n": 3}, {"n": value}])
