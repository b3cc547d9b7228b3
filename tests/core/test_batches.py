"""Finding things in nested batches, and counting their samples."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch

from tests.core.split.common import NESTED, OldPair, Pair, X, Y
from trainkit import PerSample, PerToken, TrainkitError
from trainkit.core.nested import describe, lookup

BOX = type("Box", (), {"y": Y})()


@pytest.mark.parametrize("name", [*NESTED, "attribute"])
def test_weight_of_nested_batch_equals_that_of_its_tensors(name: str) -> None:
    batch, path = NESTED.get(name, (BOX, "y"))
    assert lookup(batch, path) is Y
    assert PerToken(labels=path).weight(batch) == 4
    assert PerSample(size=path).weight(batch) == 6
    if batch is not BOX:  # nothing can look into an unknown class
        assert PerSample().weight(batch) == 6


class Graphs:
    """As a graph library's batch: neither a mapping nor a dataclass."""

    def __init__(self, num_nodes: int, num_graphs: int | None) -> None:
        self._store = {"x": torch.zeros(num_nodes, 3)}
        if num_graphs is not None:
            self.num_graphs = num_graphs


IMAGE, BOXES = torch.zeros(3, 8, 8), {"boxes": torch.zeros(2, 4)}
RECORDS = [{"a": X, "b": Y}] * 2


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (X, 6),
        ({"x": X, "scale": torch.tensor(2.0), "names": ["a", "b"], "n": 7, "m": {}}, 6),
        ({"x": torch.zeros(0, 5)}, 0),
        # Lists of fields, as `default_collate` and `CombinedLoader` make them.
        ([X, X], 6),
        ([X, Y, ("a",) * 6], 6),
        ([X, {"y": Y}], 6),
        ([X, [Y, Y]], 6),
        ([[X, Y], [X, Y]], 6),
        ([X, X, X], 6),
        ([torch.zeros(5, 8, 8)] * 3, 5),
        ({"x": X, "names": ["a"] * 6, "meta": [{"id": 1}] * 6}, 6),
        ({"views": [X, X, X], "y": Y}, 6),
        (((X, X), (Y, Y)), 6),
        ([[X[:2], X[:2]], ["a", "b"]], 2),  # names of two rows
        ((X, 0, 1), 6),  # of a sequential CombinedLoader
        # Records with the rows of a tensor outside are fields.
        ((RECORDS, Y), 6),
        ((RECORDS * 2, Y), 6),
        # An object that counts its samples is asked where there is no tensor.
        (Graphs(9, 4), 4),
        ({"graphs": Graphs(9, 4), "name": "a"}, 4),
        ((Graphs(9, 4), torch.zeros(4)), 4),
    ],
    ids=lambda value: describe(value)[:40],
)
def test_samples_of_a_batch(batch: Any, samples: int) -> None:
    assert PerSample().weight(batch) == samples


IMAGES = tuple(torch.zeros(3, 8, 9) for _ in range(5))
GRAY = tuple(torch.zeros(1, 8, 9) for _ in range(5))


@pytest.mark.parametrize(
    ("samples", "number"),
    [
        ([IMAGE] * 7, 7),
        ([(IMAGE, 1)] * 2, 2),
        ([{"image": IMAGE}], 1),
        (([IMAGE] * 2, [BOXES] * 2), 2),
        ((RECORDS, torch.zeros(2)), 2),
        # As `tuple(zip(*samples))` makes them: an image's channels were its weight.
        ((IMAGES, (0, 1, 0, 1, 0)), 2),
        ((GRAY, (0, 1, 0, 1, 0)), 2),
    ],
    ids=lambda value: describe(value)[:40],
)
def test_list_of_samples_is_refused_until_named(samples: Any, number: int) -> None:
    text = r"a list of samples has no leading dimension.*size='path\.to\.it'"
    with pytest.raises(TrainkitError, match=text):
        PerSample().weight(samples)
    assert PerSample(size="named").weight({"named": samples}) == number
    assert PerSample(size="").weight(samples) == number


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ({"x": X, "y": X[:5]}, r"PerSample: cannot tell .* has \[5, 6\]"),
        ({"x": 3, "y": "abc"}, r"has no tensor with a length.*dict\(x: int, y: str\)"),
        (torch.tensor(1.0), r"no tensor with a length.*float32\[\]"),
        (None, r"no tensor with a length.*NoneType"),
        (Graphs(9, None), r"batch is Graphs\(x: float32\[9, 3\]\)"),
    ],
)
def test_batch_without_a_size_is_refused(batch: Any, text: str) -> None:
    with pytest.raises(TrainkitError, match=text + r".*size='path\.to\.tensor'"):
        PerSample().weight(batch)


@pytest.mark.parametrize(
    ("batch", "path", "text"),
    [
        ({"x": X}, "labels", r"path 'labels': .* nothing at 'labels'.*x: float32\[6"),
        ({"y": {"a": X}}, "y.labels", r"path 'y.labels': .* nothing at 'labels'"),
        ((X,), 1, r"path 1: .* nothing at 1.*tuple\(float32\[6, 2\]\)"),
        ((X,), "labels", r"nothing at 'labels'"),
        (X, 1, r"path 1: .*float32\[6, 2\]"),
        (None, "labels", r"path 'labels'.*NoneType"),
        ({"labels": [1, 2]}, "labels", r"PerToken labels 'labels'.*list\(int, int\)"),
        ({"x": 1}, "keys", r"PerToken labels 'keys': must be the path of a tensor"),
    ],
)
def test_batch_without_labels_is_refused(batch: Any, path: Any, text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        PerToken(labels=path).weight(batch)
    with pytest.raises(TrainkitError, match=r"size='': counts the entries.*dict"):
        PerSample(size="").weight({"x": X})


ROWS = [{"x": torch.zeros(n)} for n in range(5)]
SHOWN = "dict(x: float32[0]), dict(x: float32[1])"


@pytest.mark.parametrize(
    ("batch", "shown"),
    [
        ({"x": X, "y": [1, "a"]}, "dict(x: float32[6, 2], y: list(int, str))"),
        (Pair(X, Y), "Pair(x: float32[6, 2], y: int64[6])"),
        (OldPair(X, 1), "OldPair(x: float32[6, 2], y: int)"),
        ({"a": {"b": {"c": {"d": 1}}}}, "dict(a: dict(b: dict(c: dict(...))))"),
        (list(range(10)), "list(" + "int, " * 8 + "... 2 more)"),
        (deque(range(10)), "deque(" + "int, " * 8 + "... 2 more)"),
        (ROWS, f"list({SHOWN}, ... 3 more)"),
        (ROWS[:2], f"list({SHOWN})"),
        ([*ROWS[:2], X], f"list({SHOWN}, float32[6, 2])"),
    ],
)
def test_describe_shows_the_structure(batch: Any, shown: str) -> None:
    assert describe(batch) == shown
