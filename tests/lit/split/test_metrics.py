"""Metric objects in `training_step` show the same with the cut and without it."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torchmetrics import MeanMetric, MeanSquaredError, MetricCollection, SumMetric
from torchmetrics.aggregation import RunningMean
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassF1Score,
    MulticlassPrecision,
)
from torchmetrics.wrappers import BinaryTargetTransformer, MinMaxMetric

from tests.helpers import VOCABULARY
from tests.lit.split.common import CUTS, Split, assert_same_logs, logged
from trainkit import PerSample

Metrics = dict[str, torchmetrics.Metric | MetricCollection]


def accuracy(**how: Any) -> MulticlassAccuracy:
    return MulticlassAccuracy(VOCABULARY, ignore_index=-100, average="micro", **how)


class FullState(torchmetrics.Metric):
    """Each update needs to see the state: a running maximum and how often it rose."""

    full_state_update = True
    higher_is_better = None
    is_differentiable = False
    best: Tensor
    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("best", torch.tensor(0.0), dist_reduce_fx="max")
        self.add_state("sums", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        self.best = torch.maximum(self.best, predictions.max().float())
        self.sums = self.sums + (labels != -100).sum()

    def compute(self) -> Tensor:
        return self.best + self.sums


class Measured(Split):
    """Has a metric for each of these ways, and uses it so."""

    def __init__(self, make: Any, *ways: str, **options: Any) -> None:
        super().__init__(**options)
        self.metric = nn.ModuleDict({"in_" + way: make() for way in ways})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        logits = self.net(batch["ids"]).detach().flatten(0, 1)
        labels = batch["labels"].flatten()
        keep = labels != -100
        for way, metric in self.metric.items():
            use = getattr(self, "use_" + way.removeprefix("in_"))
            use(metric, way, logits[keep], labels[keep])
        return loss

    def use_called(self, metric: Any, name: str, *data: Tensor) -> None:
        metric(*data)
        self.log(name, metric, on_step=True, on_epoch=True)

    def use_updated(self, metric: Any, name: str, *data: Tensor) -> None:
        metric.update(*data)
        self.log(name, metric, on_step=False, on_epoch=True)

    def use_returned(self, metric: Any, name: str, *data: Tensor) -> None:
        self.log(name, metric(*data), on_step=True, on_epoch=False)

    def use_twice(self, metric: Any, name: str, *data: Tensor) -> None:
        is_even = data[1] % 2 == 0
        metric(*(each[is_even] for each in data))
        metric(*(each[~is_even] for each in data))
        self.log(name, metric, on_step=True, on_epoch=True)

    def use_collection(self, metric: Any, name: str, *data: Tensor) -> None:
        metric(*data)
        self.log_dict(metric, on_step=True, on_epoch=True)

    def use_first(self, metric: Any, name: str, logits: Tensor, labels: Tensor) -> None:
        self.log("value", metric(logits[:, 0], labels), on_epoch=False)
        self.log(name, metric, on_step=True, on_epoch=True)

    def use_first_alone(
        self, metric: Any, name: str, logits: Tensor, labels: Tensor
    ) -> None:
        metric.update(logits[:, 0])

    def use_returned_dict(self, metric: Any, name: str, *data: Tensor) -> None:
        self.log_dict(metric(*data), on_step=True, on_epoch=False)


MAKERS: dict[str, Any] = {
    "accuracy": accuracy,
    "macro": lambda: MulticlassAccuracy(VOCABULARY, average="macro"),
    "f1": lambda: MulticlassF1Score(VOCABULARY, average="macro"),
    "list states": lambda: MulticlassAUROC(VOCABULARY, average="macro"),
    "full state": FullState,
}
QUIET = [
    pytest.mark.filterwarnings("ignore:No (positive|negative) samples:UserWarning"),
    pytest.mark.filterwarnings("ignore:You called `self.log:UserWarning"),
    pytest.mark.filterwarnings("ignore:Metric `\\w+` will save all:UserWarning"),
]
pytestmark = QUIET


def assert_alike(make: Any, how: str, cut: str = "size", **options: Any) -> Any:
    ours = logged(Measured(make, how, cut=CUTS[cut]), **options)
    whole = logged(Measured(make, how, cut=None), **options)
    assert_same_logs(ours, whole)
    return whole


WAYS = ("called", "updated", "returned")


@cache
def logged_in_every_way(kind: str, cut: str | None) -> Any:
    """One training of three metrics of a kind, each used in one of the ways."""
    return logged(Measured(MAKERS[kind], *WAYS, cut=CUTS[cut] if cut else None))


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("kind", MAKERS)
def test_metric_equals_that_of_the_whole_batch(kind: str, how: str) -> None:
    """Every step's value, every epoch's, and that they begin anew in each epoch."""
    ours, whole = (logged_in_every_way(kind, cut) for cut in ("size", None))
    assert_same_logs(ours, whole)
    rows, metrics = whole
    values = {v for row in rows for k, v in row.items() if k.startswith("in_" + how)}
    assert len(values) > (1 if how == "updated" else 3)
    assert any(key.startswith("in_" + how) for key in metrics)


def test_wrapped_metric_equals_that_of_the_whole_batch() -> None:
    """A wrapper holds another metric object, and returns a dict."""

    def make() -> Any:
        inner = MulticlassAccuracy(VOCABULARY, average="none")
        return torchmetrics.MetricCollection(
            {"classes": torchmetrics.ClasswiseWrapper(inner)}
        )

    assert_alike(make, "returned_dict")


def shifted() -> BinaryTargetTransformer:
    return BinaryTargetTransformer(MeanSquaredError(), threshold=2)


@pytest.mark.parametrize(
    ("make", "how"),
    [
        (lambda: MinMaxMetric(accuracy()), "returned_dict"),
        (shifted, "first"),
    ],
)
def test_wrapper_that_counts_no_updates_of_its_own(make: Any, how: str) -> None:
    """What it is given is an update of the metric that it wraps, not of the wrapper."""
    assert_alike(make, how)


def collection(**how: Any) -> MetricCollection:
    """Accuracy and precision share a compute group."""
    made = {"a": accuracy(), "p": MulticlassPrecision(VOCABULARY, average="macro")}
    made["r"] = torchmetrics.Recall("multiclass", num_classes=VOCABULARY)
    return MetricCollection(made, prefix="train/", **how)


@pytest.mark.parametrize("groups", [True, False])
@pytest.mark.parametrize("how", ["collection", "returned_dict"])
def test_metric_collection_equals_that_of_the_whole_batch(
    how: str, groups: bool
) -> None:
    _, metrics = assert_alike(lambda: collection(compute_groups=groups), how)
    assert len(metrics) >= 3


def test_metric_that_is_called_twice_shows_its_last_call() -> None:
    assert_alike(lambda: accuracy(), "twice")


def test_value_of_the_last_micro_batch_differs() -> None:
    """Negative control: what the metric object itself keeps for the step."""
    module = Measured(accuracy, "called")
    seen: list[float] = []
    module.metric["in_called"].register_forward_hook(
        lambda m, args, out: seen.append(float(out))
    )
    rows, _ = logged(module)
    steps = [row["in_called_step"] for row in rows if "in_called_step" in row]
    assert len(seen) > len(steps)
    assert all(min(abs(s - v) for v in seen) > 1e-9 for s in steps[:1])


class Averaged(Split):
    """Feeds the loss to a `MeanMetric`, as the Lightning-Hydra template does, in each
    of some ways."""

    def __init__(self, *ways: str, **options: Any) -> None:
        super().__init__(**options)
        self.means = nn.ModuleDict({"mean_" + way: MeanMetric() for way in ways})
        self.rows = SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.rows(len(batch["ids"]))
        self.log("rows", self.rows, on_step=True, on_epoch=True)
        counts = (batch["labels"] != -100).sum(1)
        for name, mean in self.means.items():
            self.feed(mean, name.removeprefix("mean_"), loss, counts)
            on_step = name != "mean_updated"
            self.log(name, mean, on_step=on_step, on_epoch=True)
        return loss

    def feed(self, mean: Any, how: str, loss: Tensor, counts: Tensor) -> None:
        if how == "called":
            mean(loss)
        elif how == "updated":
            mean.update(loss)
        elif how == "number":
            mean(loss.item())
        elif how == "weighted":
            mean(loss, weight=counts.sum())
        else:
            mean(counts.float())


FEEDS = ("called", "updated", "number", "weighted", "rows")


@cache
def averaged(cut: str | None) -> Any:
    return logged(Averaged(*FEEDS, cut=CUTS[cut] if cut else None))


@pytest.mark.parametrize("cut", ["size", "rows"])
@pytest.mark.parametrize("how", FEEDS)
def test_mean_metric_counts_a_loader_batch_once(how: str, cut: str) -> None:
    assert any(name.startswith("mean_" + how) for name in averaged(None)[1])
    assert_same_logs(averaged(cut), averaged(None))


def test_mean_metric_counts_samples_under_per_sample() -> None:
    made = [Averaged("called", cut=cut) for cut in (CUTS["size"], None)]
    for each in made:
        each.accumulation = PerSample()
    with pytest.raises(AssertionError):  # a mean over tokens, weighed by samples
        assert_same_logs(*map(logged, made))


def test_metric_objects_are_left_as_they_were() -> None:
    module = Averaged("called")
    mean = module.means["mean_called"]
    update = vars(mean)["update"]
    logged(module)
    assert vars(mean)["update"] is update
    assert not mean._forward_hooks


@pytest.mark.parametrize("how", ["called", "updated"])
def test_metric_with_several_loader_batches_in_a_window(how: str) -> None:
    """The step value is that of the loader batch, as without the cut."""
    assert_alike(accuracy, how, window=2, sizes=(8, 9, 7))


def test_metric_that_counts_its_updates_is_announced() -> None:
    module = Measured(partial(RunningMean, window=2), "first_alone", cut=CUTS["size"])
    text = r"metric metric.in_first_alone: RunningMean looks back.* 2 up"
    with pytest.warns(UserWarning, match=text):
        logged(module)
