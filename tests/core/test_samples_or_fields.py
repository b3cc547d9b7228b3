"""Lists of a batch: samples, or fields?"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainkit import (
    PerSample,
)
from trainkit.errors import TrainkitError

LABELS = torch.tensor([[5, 7, -100], [5, -100, -100]])


@pytest.mark.parametrize(
    "samples",
    [
        [torch.zeros(3, 8, 8)] * 7,
        [(torch.zeros(3, 8, 8), 1)] * 2,
        [{"image": torch.zeros(3, 8, 8)}],
        ([torch.zeros(3, 8, 8)] * 2, [{"boxes": torch.zeros(2, 4)}] * 2),
    ],
)
def test_list_of_samples_is_refused_until_named(samples: Any) -> None:
    """The first dimension of an image is no number of samples."""
    with pytest.raises(TrainkitError, match="a list of samples has no leading dimen"):
        PerSample().weight(samples)
    assert PerSample(size="images").weight({"images": samples}) == len(samples)


X, Y = torch.zeros(5, 2), torch.zeros(5)


@pytest.mark.parametrize(
    "fields",
    [
        [X, X],
        [X, Y, ("a",) * 5],
        [X, {"y": Y}],
        [X, [Y, Y]],
        {"x": X, "names": ["a"] * 5, "meta": [{"id": 1}] * 5},
        {"views": [X, X, X], "y": Y},
        [[X, Y], [X, Y]],
    ],
)
def test_list_of_fields_is_no_list_of_samples(fields: Any) -> None:
    """As `default_collate` and `CombinedLoader` make them."""
    assert PerSample().weight(fields) == 5


def test_tensors_in_a_list_are_fields() -> None:
    """As `default_collate` makes them, also where they are all alike."""
    for batch in ([Y, Y], [X, X, X], [torch.zeros(5, 8, 8)] * 2, {"rows": [Y, Y]}):
        assert PerSample().weight(batch) == 5
    assert PerSample(size="").weight([Y, Y]) == 2  # where they are samples


def test_list_of_records_with_the_rows_of_a_tensor_outside_is_one_of_fields() -> None:
    records = [{"a": torch.zeros(4, 2), "b": torch.zeros(4)} for _ in range(2)]
    assert PerSample().weight((records, torch.zeros(4))) == 4
    assert PerSample().weight((records * 2, torch.zeros(4))) == 4
    with pytest.raises(TrainkitError, match="list of samples"):
        PerSample().weight((records, torch.zeros(2)))


class Graphs:
    """As a graph library's batch: neither a mapping nor a dataclass."""

    def __init__(self, num_nodes: int, num_graphs: int | None) -> None:
        self._store = {"x": torch.zeros(num_nodes, 3)}
        if num_graphs is not None:
            self.num_graphs = num_graphs


def test_object_that_counts_its_samples_is_asked() -> None:
    assert PerSample().weight(Graphs(9, 4)) == 4
    assert PerSample().weight({"graphs": Graphs(9, 4), "name": "a"}) == 4
    assert PerSample().weight((Graphs(9, 4), torch.zeros(4))) == 4
    with pytest.raises(
        TrainkitError, match=r"batch is Graphs\(x: float32\[9, 3\]\).*size="
    ):
        PerSample().weight(Graphs(9, None))


def test_size_of_a_batch_that_is_no_list_is_refused() -> None:
    with pytest.raises(TrainkitError, match=r"size='': counts the entries.*float32"):
        PerSample(size="").weight({"x": X})


@pytest.mark.parametrize("channels", [1, 3])
def test_transposed_samples_are_no_fields(channels: int) -> None:
    """`collate_fn=lambda rows: tuple(zip(*rows))` leaves images apart: they weighed as
    many as an image has channels, whatever their number."""
    images = tuple(torch.zeros(channels, 8, 9) for _ in range(5))
    batch = (images, (0, 1, 0, 1, 0))
    with pytest.raises(TrainkitError, match=r"size='path\.to\.it'"):
        PerSample().weight(batch)
    assert PerSample(size=1).weight(batch) == 5


@pytest.mark.parametrize(
    "batch",
    [
        ((torch.ones(5, 2), torch.ones(5, 3)), (torch.ones(5), torch.ones(5))),
        [[torch.ones(2, 3), torch.ones(2, 4)], ["a", "b"]],  # names of two rows
        ((torch.ones(4, 2), torch.ones(4)), 0, 1),  # of a sequential CombinedLoader
    ],
)
def test_pairs_of_fields_are_not_taken_for_transposed_samples(batch: Any) -> None:
    assert PerSample().weight(batch) == len(batch[0][0])
