"""What a micro-batch weighs."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.core.common import (
    ByClass,
    GivenWeight,
    average_window,
    fresh_net,
    padded,
    relative,
    run_window,
    token_losses,
)
from tests.helpers import NAIVE, gradients, ragged_sequences
from trainkit import (
    AccumulationStrategy,
    Accumulator,
    PerClassWeight,
    PerSample,
    PerToken,
    Uniform,
)
from trainkit.core.strategies import weigh_alike
from trainkit.errors import TrainkitError

LABELS = torch.tensor([[5, 7, -100], [5, -100, -100]])


def test_per_token_counts_labels_that_count() -> None:
    """composer#3273: padding is no token."""
    assert PerToken().weight({"labels": LABELS}) == 3
    assert PerToken(ignore_index=5).weight({"labels": LABELS}) == 4
    assert PerToken().weight({"labels": LABELS.to(torch.int16)}) == 3


def test_per_token_with_shift_counts_no_first_label() -> None:
    """transformers#46204: a causal model has no target at position 0."""
    assert PerToken(shift=True).weight({"labels": LABELS}) == 1
    mask = {"mask": torch.tensor([[0.5, 2.0], [9.0, 0.0]])}
    assert PerToken(mask="mask", shift=True).weight(mask) == 2.0


@pytest.mark.parametrize("ignore_index", [-100, 2])
def test_class_weights_are_what_cross_entropy_divides_by(ignore_index: int) -> None:
    weight = torch.tensor([0.5, 2.0, 0.0, 1.5])
    labels = torch.tensor([[0, 1, 3], [2, 3, ignore_index]])
    logits = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    options = {"weight": weight, "ignore_index": ignore_index}
    mean = F.cross_entropy(logits, labels, **options)  # type: ignore[arg-type]
    total = F.cross_entropy(logits, labels, **options, reduction="sum")  # type: ignore[arg-type]
    strategy = PerClassWeight(labels="y", **options)  # type: ignore[arg-type]
    assert float(strategy.weight({"y": labels})) == pytest.approx(float(total / mean))
    counted = PerToken(labels="y", ignore_index=ignore_index).weight({"y": labels})
    assert float(strategy.weight({"y": labels})) != float(counted)  # the control
    narrow = {"y": labels.to(torch.int16)}
    assert strategy.weight(narrow) == strategy.weight({"y": labels})


def test_class_weights_are_equal_if_they_weigh_alike() -> None:
    one, other = PerClassWeight(weight=[1, 2]), PerClassWeight(weight=torch.ones(2))
    one.weight({"labels": torch.tensor([1])})
    assert weigh_alike(one, PerClassWeight(weight=[1.0, 2.0]))
    assert not weigh_alike(one, other)
    assert repr(one) == (
        "PerClassWeight(weight=[1.0, 2.0], labels='labels', ignore_index=-100, "
        "loss_reduction='mean')"
    )


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


@pytest.mark.parametrize("label", [2, -1])
def test_a_label_without_a_weight_is_refused(label: int) -> None:
    """Indexed from the end, -1 would have the last class's."""
    strategy = PerClassWeight(weight=[1.0, 2.0])
    with pytest.raises(TrainkitError, match=r"labels 'labels': must be classes from 0"):
        strategy.weight({"labels": torch.tensor([0, label])})


def test_labels_of_another_name_are_given_or_suggested() -> None:
    batch = {"x": torch.zeros(2, 3), "targets": torch.zeros(2, 3, dtype=torch.long)}
    assert PerToken("targets").weight(batch) == 6
    with pytest.raises(TrainkitError, match=r"PerToken labels: .*would fit: 'targets'"):
        PerToken().weight(batch)


@pytest.mark.parametrize("weight", [[], [1.0, -1.0], [float("nan")], "heavy", None, 3])
def test_what_are_no_class_weights_is_refused(weight: Any) -> None:
    with pytest.raises(TrainkitError, match="PerClassWeight weight: must be one"):
        PerClassWeight(weight=weight)


def test_mask_weighs_its_sum() -> None:
    batch = {"mask": torch.tensor([[1.0, 0.25], [0.0, 2.0]]), "rows": torch.ones(2)}
    assert PerToken(mask="mask").weight(batch) == 3.25
    assert PerSample(mask="rows").weight(batch) == 2
    assert PerSample(mask="rows").weight({"rows": torch.tensor([True, False])}) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_mask_in_low_precision_weighs_its_exact_sum(dtype: torch.dtype) -> None:
    """The control: bfloat16 counts 1001 ones as 1000."""
    weight = PerToken(mask="m").weight({"m": torch.ones(1001, dtype=dtype)})
    assert float(weight) == 1001  # compared as bfloat16, 1000 would pass
    assert float(torch.ones(1001, dtype=torch.bfloat16).sum()) == 1000


def test_weight_stays_a_tensor_on_its_device() -> None:
    batch = {"labels": LABELS.to("meta"), "mask": torch.ones(3, device="meta")}
    assert PerToken().weight(batch).device.type == "meta"  # type: ignore[union-attr]
    assert PerToken(mask="mask").weight(batch).device.type == "meta"  # type: ignore[union-attr]
    assert PerSample().weight({"x": batch["labels"]}) == 2


def test_uniform_weighs_one_and_asks_nothing_of_the_batch() -> None:
    assert Uniform().weight(None) == 1


@pytest.mark.parametrize("strategy", [PerSample(), PerToken(), Uniform()])
def test_strategy_is_a_frozen_value(strategy: Any) -> None:
    assert strategy == type(strategy)()
    assert hash(strategy) == hash(type(strategy)())
    with pytest.raises(dataclasses.FrozenInstanceError):
        strategy.loss_reduction = "sum"


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
    ],
)
def test_option_out_of_range_is_refused(make: Any, text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        make()


@pytest.mark.parametrize(
    ("strategy", "batch", "text"),
    [
        (PerToken(), {"labels": torch.ones(3)}, "must hold integers.*float32"),
        (PerToken(), {"labels": torch.tensor(3)}, "one entry per token"),
        (PerToken(mask="m"), {"m": torch.tensor(3.0)}, "mask: must have one entry"),
        (PerSample(size="n"), {"n": torch.tensor(3)}, "a tensor with a length"),
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


@pytest.mark.parametrize(
    ("strategy", "text"),
    [(PerToken, "received <class"), ("PerToken", "received 'PerToken'")],
)
def test_strategy_that_is_no_object_is_refused(strategy: Any, text: str) -> None:
    with pytest.raises(TrainkitError, match=f"AccumulationStrategy, {text}"):
        Accumulator(strategy)


def test_own_strategy_with_a_wrong_reduction_is_refused() -> None:
    with pytest.raises(TrainkitError, match="ByClass loss_reduction.*'median'"):
        Accumulator(ByClass("median"))


WEIGHTS = [3, 3.0, np.int64(3), np.float32(3), torch.tensor(3), torch.tensor([[3.0]])]


@pytest.mark.parametrize("three", WEIGHTS, ids=lambda w: f"{type(w).__name__}-{w}")
def test_weight_of_any_numeric_type_equals_its_value(three: Any) -> None:
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    accumulator = Accumulator(GivenWeight())
    accumulator.backward(parameter.sum(), three)
    accumulator.backward(5 * parameter.sum(), weight=1)
    assert accumulator.finish([parameter]).weight == 4
    torch.testing.assert_close(parameter.grad, torch.full_like(parameter, 2.0))


@pytest.mark.parametrize("mask", ["samples", "tokens"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_real_valued_weights_equal_their_big_batch(mask: str, reduction: Any) -> None:
    """keras#19740, #20410: a weighted mean divides by the sum of its weights."""
    samples = ragged_sequences(12, longest=30)
    generator = torch.Generator().manual_seed(3)
    importance = 3 * torch.rand(12, generator=generator, dtype=torch.float64)

    def batch(rows: slice) -> dict[str, torch.Tensor]:
        whole = padded(samples[rows])
        tokens = 0.37 * (1 + whole["ids"] % 5).double() * (whole["labels"] != -100)
        return {**whole, "samples": importance[rows], "tokens": tokens}

    def loss(net: Any, batch: Any, reduction: str) -> torch.Tensor:
        losses = token_losses(net, batch)
        losses = losses.sum(1) if mask == "samples" else losses
        total = (losses * batch[mask]).sum()
        return total / batch[mask].sum() if reduction == "mean" else total

    cut = [batch(slice(0, 1)), batch(slice(1, 4)), batch(slice(4, 12))]
    kind: Any = PerSample if mask == "samples" else PerToken
    net, reference = fresh_net(), fresh_net()
    run_window(net, cut, kind(mask=mask, loss_reduction=reduction), loss)
    loss(reference, batch(slice(0, 12)), "mean").backward()
    assert relative(gradients(net), gradients(reference)) <= 1e-12
    naive = average_window(fresh_net(), cut, loss)
    assert relative(naive, gradients(reference)) > NAIVE


def test_three_denominators_equal_their_big_batch() -> None:
    """allenai/open-instruct#1137, fw-ai/cookbook#200: token mean, sequence mean and a
    fixed constant are three strategies over the same losses."""
    samples = ragged_sequences(12, longest=30)
    cut = [padded(samples[:1]), padded(samples[1:4]), padded(samples[4:])]

    def sequences(net: Any, batch: Any, reduction: str) -> torch.Tensor:
        rows = token_losses(net, batch).sum(1)
        return rows.mean() if reduction == "mean" else rows.sum()

    def constant(net: Any, batch: Any, reduction: str) -> torch.Tensor:
        return token_losses(net, batch).sum() / 64

    def tokens(net: Any, batch: Any, reduction: str) -> torch.Tensor:
        labels = batch["labels"].flatten()
        return F.cross_entropy(net(batch["ids"]).flatten(0, 1), labels)

    for strategy, loss in ((PerToken(), tokens), (PerSample(), sequences)):
        net, reference = fresh_net(), fresh_net()
        run_window(net, cut, strategy, loss)
        loss(reference, padded(samples), "mean").backward()
        assert relative(gradients(net), gradients(reference)) <= 1e-12
        naive = average_window(fresh_net(), cut, loss)
        assert relative(naive, gradients(reference)) > NAIVE

    # A constant is no mean over what is in the batch: the whole window divides by it.
    net, reference = fresh_net(), fresh_net()
    accumulator = Accumulator(GivenConstant(64 / 3))
    run_window(net, cut, accumulator, lambda n, b, r: token_losses(n, b).sum())
    constant(reference, padded(samples), "sum").backward()
    assert relative(gradients(net), gradients(reference)) <= 1e-12


class GivenConstant(AccumulationStrategy):
    """A third of the constant for each of three micro-batches."""

    loss_reduction = "sum"

    def __init__(self, share: float) -> None:
        self.share = share

    def weight(self, batch: Any) -> float:
        return self.share


def test_ignore_index_is_not_taken_around_by_narrow_labels() -> None:
    labels = torch.full((4,), 156, dtype=torch.uint8)
    assert int(PerToken().weight({"labels": labels})) == 4


class ByTable(AccumulationStrategy):
    def __init__(self, table: Any) -> None:
        self.table = table

    def weight(self, batch: Any) -> Any:
        return self.table[batch].sum()


def test_strategies_of_one_class_that_hold_the_same_weigh_alike() -> None:
    table = torch.ones(3)
    assert weigh_alike(ByTable(table), ByTable(table))
    assert weigh_alike(ByTable([1, 2]), ByTable([1, 2]))
    assert not weigh_alike(ByTable(table), ByTable(table.clone()))
    assert not weigh_alike(ByTable([1, 2]), ByTable([1, 3]))
    assert not weigh_alike(ByTable([table]), ByTable([table.clone()]))
    used = PerSample()
    used.weight([torch.ones(2, 8, 9, 9), torch.ones(2, 8, 9, 9)])
    assert weigh_alike(used, PerSample())
    assert not weigh_alike(used, PerSample(size="x"))
    assert not weigh_alike(PerSample(), PerToken())
