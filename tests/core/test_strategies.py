"""What a micro-batch weighs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.core.common import GivenWeight
from trainkit import (
    AccumulationStrategy,
    Accumulator,
    PerClassWeight,
    PerSample,
    PerToken,
    TrainkitError,
    Uniform,
)

LABELS = torch.tensor([[5, 7, -100], [5, -100, -100]])
TARGETS = {"x": torch.zeros(2, 3), "targets": torch.zeros(2, 3, dtype=torch.long)}
MASK = torch.tensor([[0.5, 2.0], [9.0, 0.0]])


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


# ---- values --------------------------------------------------------------------------


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
        (lambda: PerToken(loss_reduction="avg"), "'total', received 'avg'"),  # type: ignore[arg-type]
        (lambda: PerSample(loss_reduction=None), "'total', received None"),  # type: ignore[arg-type]
        (lambda: PerToken(labels=1.5), "labels: must be a dotted path.*1.5"),  # type: ignore[arg-type]
        (lambda: PerToken(labels=""), "labels: must be a dotted path"),
        (lambda: PerSample(size=True), "size: must be a dotted path.*True"),
        (lambda: PerToken(ignore_index=-1.0), "ignore_index: must be an integer"),  # type: ignore[arg-type]
        (lambda: PerToken(ignore_index=False), "ignore_index: must be an integer"),
        (lambda: Accumulator(PerToken), "AccumulationStrategy, received <class"),  # type: ignore[arg-type]
        (lambda: Accumulator("PerToken"), "Strategy, received 'PerToken'"),  # type: ignore[arg-type]
        (
            lambda: Accumulator(GivenWeight("median")),
            "GivenWeight loss_reduction.*'median'",
        ),
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
        (PerSample(size="n"), {"n": torch.tensor(3)}, "a tensor with a length"),
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
