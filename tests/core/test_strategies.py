"""What a micro-batch weighs."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.core.common import GivenWeight
from tests.core.split.common import NESTED, OldPair, Pair, X, Y
from trainkit import (
    AccumulationStrategy,
    Accumulator,
    PerClassWeight,
    PerSample,
    PerToken,
    TrainkitError,
    Uniform,
)
from trainkit.core.nested import describe, lookup

LABELS = torch.tensor([[5, 7, -100], [5, -100, -100]])
TARGETS = {"x": torch.zeros(2, 3), "targets": torch.zeros(2, 3, dtype=torch.long)}
MASK = torch.tensor([[0.5, 2.0], [9.0, 0.0]])
MEDIAN = GivenWeight("median")


@pytest.mark.parametrize(
    ("strategy", "batch", "weight"),
    [
        (PerToken(), {"labels": LABELS}, 3),  # composer#3273: padding is no token
        (PerToken(ignore_index=5), {"labels": LABELS}, 4),
        (PerToken(), {"labels": LABELS.to(torch.int16)}, 3),
        # In uint8, -100 would be 156.
        (PerToken(), {"labels": torch.full((4,), 156, dtype=torch.uint8)}, 4),
        # transformers#46204: a causal model has no target at position 0
        (PerToken(shift=True), {"labels": LABELS}, 1),
        (PerToken(mask="mask", shift=True), {"mask": MASK}, 2.0),
        (PerToken(mask="mask"), {"mask": MASK}, 11.5),
        (PerToken("targets"), TARGETS, 6),
        (PerSample(mask="rows"), {"rows": torch.ones(2)}, 2),
        (PerSample(mask="rows"), {"rows": torch.tensor([True, False])}, 1),
        (PerSample(), {"x": LABELS.to("meta")}, 2),
        (Uniform(), None, 1),
        (PerClassWeight(weight=[1.0, 3.0]), {"labels": torch.tensor([0, 1, 1])}, 7),
    ],
    ids=str,
)
def test_weight_equals_what_counts(strategy: Any, batch: Any, weight: float) -> None:
    assert strategy.weight(batch) == weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_mask_in_low_precision_weighs_its_exact_sum(dtype: torch.dtype) -> None:
    """The control: bfloat16 counts 1001 ones as 1000."""
    weight = PerToken(mask="m").weight({"m": torch.ones(1001, dtype=dtype)})
    assert float(weight) == 1001  # compared as bfloat16, 1000 would pass
    assert float(torch.ones(1001, dtype=torch.bfloat16).sum()) == 1000


def test_weight_stays_a_tensor_on_its_device() -> None:
    batch = {"labels": LABELS.to("meta"), "mask": torch.ones(3, device="meta")}
    for strategy in (PerToken(), PerToken(mask="mask")):
        assert strategy.weight(batch).device.type == "meta"  # type: ignore[union-attr]


# ---- class weights -------------------------------------------------------------------


@pytest.mark.parametrize("ignore_index", [-100, 2])
def test_class_weights_are_what_cross_entropy_divides_by(ignore_index: int) -> None:
    weight = torch.tensor([0.5, 2.0, 0.0, 1.5])
    labels = torch.tensor([[0, 1, 3], [2, 3, ignore_index]])
    logits = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    options: Any = {"weight": weight, "ignore_index": ignore_index}
    mean = F.cross_entropy(logits, labels, **options)
    total = F.cross_entropy(logits, labels, **options, reduction="sum")
    strategy = PerClassWeight(labels="y", **options)
    assert float(strategy.weight({"y": labels})) == pytest.approx(float(total / mean))
    counted = PerToken(labels="y", ignore_index=ignore_index).weight({"y": labels})
    assert float(strategy.weight({"y": labels})) != float(counted)  # the control
    narrow = {"y": labels.to(torch.int16)}
    assert strategy.weight(narrow) == strategy.weight({"y": labels})


def test_class_weights_follow_a_tensor_that_changes_and_a_function() -> None:
    """As deferred re-weighting does; a copy of the numbers would weigh 3."""
    weight, batch = torch.tensor([1.0, 2.0]), {"labels": torch.tensor([0, 1])}
    held = [weight]
    read, asked = PerClassWeight(weight=weight), PerClassWeight(weight=lambda: held[0])
    weight[1] = 8.0
    assert float(read.weight(batch)) == float(asked.weight(batch)) == 9
    held[0] = torch.tensor([5.0, 5.0])
    assert float(read.weight(batch)) == 9
    assert float(asked.weight(batch)) == 10


def test_class_weights_show_what_they_hold() -> None:
    assert repr(PerClassWeight(weight=[1, 2])) == (
        "PerClassWeight(weight=[1.0, 2.0], labels='labels', ignore_index=-100, "
        "loss_reduction='mean')"
    )


@pytest.mark.parametrize("strategy", [PerSample(), PerToken(), Uniform()])
def test_strategy_is_a_frozen_value(strategy: Any) -> None:
    assert strategy == type(strategy)()
    assert hash(strategy) == hash(type(strategy)())
    with pytest.raises(dataclasses.FrozenInstanceError):
        strategy.loss_reduction = "sum"


# ---- what is refused -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: PerSample(size=1, mask="m"), "size and mask exclude each other"),
        (lambda: PerToken(loss_reduction="avg"), "'total'], received 'avg'"),  # type: ignore[arg-type]
        (lambda: PerSample(loss_reduction=None), "'total'], received None"),  # type: ignore[arg-type]
        (lambda: PerToken(labels=1.5), "labels: must be a dotted path.*1.5"),  # type: ignore[arg-type]
        (lambda: PerToken(labels=""), "labels: must be a dotted path"),
        (lambda: PerSample(size=True), "size: must be a dotted path.*True"),
        (lambda: PerToken(shift=1), "shift: must be True or False, received 1"),  # type: ignore[arg-type]
        (lambda: PerToken(ignore_index=-1.0), "ignore_index: must be an integer"),  # type: ignore[arg-type]
        (lambda: PerToken(ignore_index=False), "ignore_index: must be an integer"),
        (lambda: Accumulator(PerToken), "AccumulationStrategy, received <class"),  # type: ignore[arg-type]
        (lambda: Accumulator("PerToken"), "Strategy, received 'PerToken'"),  # type: ignore[arg-type]
        (lambda: Accumulator(MEDIAN), "GivenWeight loss_reduction.*'median'"),
    ],
)
def test_option_out_of_range_is_refused(make: Any, text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        make()


@pytest.mark.parametrize("weight", [[], [1.0, -1.0], [float("nan")], "heavy", None, 3])
def test_what_are_no_class_weights_is_refused(weight: Any) -> None:
    with pytest.raises(TrainkitError, match="PerClassWeight weight: must be one"):
        PerClassWeight(weight=weight)


TWO_CLASSES = PerClassWeight(weight=[1.0, 2.0])


@pytest.mark.parametrize(
    ("strategy", "batch", "text"),
    [
        (PerToken(), {"labels": torch.ones(3)}, "must hold integers.*float32"),
        (PerToken(), {"labels": torch.tensor(3)}, "one entry per token"),
        (PerToken(mask="m"), {"m": torch.tensor(3.0)}, "mask: must have one entry"),
        (PerSample(size="n"), {"n": torch.tensor(3)}, "must lead to a tensor"),
        (PerSample(size="n"), TARGETS, "PerSample size: path 'n'.*would fit: "),
        (PerToken(), TARGETS, r"PerToken labels: .*would fit: 'targets'"),
        (TWO_CLASSES, {"labels": torch.tensor([0, 2])}, "must be classes from 0 to 1"),
        # Indexed from the end, -1 would have the last class's.
        (TWO_CLASSES, {"labels": torch.tensor([0, -1])}, "must be classes from 0 to 1"),
    ],
)
def test_batch_that_cannot_be_counted_is_refused(
    strategy: AccumulationStrategy, batch: Any, text: str
) -> None:
    with pytest.raises(TrainkitError, match=text):
        strategy.weight(batch)


def test_strategy_without_a_weight_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="abstract"):
        AccumulationStrategy()  # type: ignore[abstract]


# ---- finding things in nested batches, and counting their samples --------------------

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


class Unsure:
    """As a batch of torch_geometric that was not made of graphs."""

    batch_size = 3

    @property
    def num_graphs(self) -> int:
        raise ValueError("cannot infer the number of graphs")


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
        (Unsure(), 3),
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
    with pytest.raises(TrainkitError, match=r"size '': must lead to .*dict"):
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
