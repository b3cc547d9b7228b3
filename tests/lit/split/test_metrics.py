"""Metric objects in `training_step` of split windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassF1Score,
    MulticlassPrecision,
)
from torchmetrics.wrappers import ClasswiseWrapper, MetricTracker

from tests.helpers import VOCABULARY
from tests.lit.split.common import CUTS, Split, assert_as_whole, fit, relabelled
from tests.zoo.callbacks import Table, told
from tests.zoo.modules import hooked
from trainkit import PerSample

SAID = "self.log('called'): the value of a metric object"
pytestmark = [
    pytest.mark.filterwarnings("ignore:No (positive|negative) samples:UserWarning"),
    pytest.mark.filterwarnings("ignore:You called `self.log:UserWarning"),
    pytest.mark.filterwarnings("ignore:Metric `\\w+` will save all:UserWarning"),
    pytest.mark.filterwarnings("ignore:self.log.*the value of a metric object"),
]


def accuracy(average: Any = "micro") -> MulticlassAccuracy:
    return MulticlassAccuracy(VOCABULARY, ignore_index=-100, average=average)


class FullState(torchmetrics.Metric):
    """Each update needs to see the state: a running maximum, and a sum."""

    full_state_update = True
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


def collection(**how: Any) -> MetricCollection:
    """Accuracy and precision share a compute group."""
    made = {"a": accuracy(), "p": MulticlassPrecision(VOCABULARY, average="macro")}
    return MetricCollection(made, prefix="train/", **how)


MAKERS: dict[str, Callable[[], Any]] = {
    "accuracy": accuracy,
    "macro": lambda: accuracy("macro"),
    "f1": lambda: MulticlassF1Score(VOCABULARY, average="macro"),
    "list states": lambda: MulticlassAUROC(VOCABULARY, average="macro"),
    "full state": FullState,
    "collection": collection,
    "collection without groups": lambda: collection(compute_groups=False),
    "wrapper": lambda: ClasswiseWrapper(accuracy("none")),
    # It has a new metric in each epoch.
    "tracker": lambda: MetricTracker(accuracy("macro")),
}


FEEDS = ("mean_called", "mean_updated", "mean_number", "mean_weighted", "mean_rows")


class Measured(Split):
    """Calls one metric object of each kind, and updates another; feeds the loss to
    `MeanMetric`s, as templates do.

    Attributes:
        most: rows for which there is memory; it runs out after the metrics were asked.
    """

    most = 99

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.used: Any = nn.ModuleDict({kind: make() for kind, make in MAKERS.items()})
        self.updated: Any = nn.ModuleDict({k: make() for k, make in MAKERS.items()})
        self.means: Any = nn.ModuleDict({way: MeanMetric() for way in FEEDS})
        self.update = vars(self.means["mean_called"])["update"]

    def on_train_epoch_start(self) -> None:
        for metrics in (self.used, self.updated):
            metrics["tracker"].increment()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        keep = batch["labels"] != -100
        data = self.net(batch["ids"]).detach()[keep], batch["labels"][keep]
        for kind in MAKERS:
            self.used[kind](*data)
            self.updated[kind].update(*data)
        self.means["mean_called"](loss)
        self.means["mean_updated"].update(loss)
        self.means["mean_number"](loss.item())
        self.means["mean_weighted"](loss, weight=keep.sum())
        self.means["mean_rows"](keep.sum(1).float())
        for name, mean in self.means.items():
            self.log(name, mean, on_step=False, on_epoch=True)
        if self.micro_batching is not None and len(batch["ids"]) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return loss

    def on_train_epoch_end(self) -> None:
        for name in ("used", "updated"):
            for kind, metric in getattr(self, name).items():
                value = metric.compute()
                several = value if isinstance(value, dict) else {"": value}
                named = {f"{kind}/{name}/{key}": each for key, each in several.items()}
                self.log_dict(named)
                metric.reset()


@pytest.mark.parametrize(("cut", "most"), [("size", 99), ("auto", 5)])
def test_the_value_of_an_epoch_is_that_of_whole_batches(cut: str, most: int) -> None:
    """Also where memory has run out; metric objects are left as they were. With the
    weights of samples, the control, a mean over tokens is another one."""
    kind = hooked(Measured, most=most)
    how: Any = {"naive": 0, "sizes": (7, 9, 5)}
    ours = assert_as_whole(kind, CUTS[cut], **how)
    right, module = ours.callback_metrics, ours.lightning_module
    mean: Any = module.means["mean_called"]  # type: ignore[union-attr, index]
    assert vars(mean)["update"] is module.update  # type: ignore[union-attr]
    assert not mean._forward_hooks
    assert {name.split("/")[0] for name in right} == {*MAKERS, *FEEDS}
    if cut == "size":
        wrong = fit(kind(cut=CUTS[cut], strategy=PerSample()), sizes=(7, 9, 5))
        off = wrong.callback_metrics["mean_called"] - right["mean_called"]
        assert abs(off) > 1e-3


class Averaged(Split):
    """Its loss is NaN for a part in which no row has labels."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        is_empty = (batch["labels"] == -100).all()
        self.mean(torch.where(is_empty, torch.nan, loss.detach()))
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss


def test_the_mean_of_a_micro_batch_without_labels_counts_nothing() -> None:
    kind = relabelled(Averaged, 2, 3, 5, 7)
    assert_as_whole(kind, CUTS["rows"], sizes=(7, 9, 5), naive=0)


class Logged(Split):
    """Logs the metric object itself, as Lightning recommends."""

    on_step = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.called, self.seen = accuracy(), list[float]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        keep = batch["labels"] != -100
        data = self.net(batch["ids"]).detach()[keep], batch["labels"][keep]
        self.seen.append(float(self.called(*data)))
        self.log("called", self.called, on_step=self.on_step, on_epoch=True)
        return loss


@pytest.mark.parametrize("on_step", [True, False])
def test_the_value_of_a_step_is_the_last_micro_batchs_which_is_said_once(
    on_step: bool,
) -> None:
    """And nothing is said where no step is logged."""
    kind, table = hooked(Logged, on_step=on_step), Table()
    module = kind()
    with told(SAID) as said:
        ours = fit(module, logger=table, log_every_n_steps=1).callback_metrics
    assert len(said) == on_step
    steps = table.column("called_step")
    assert len(steps) == 6 * on_step
    assert all(min(abs(step - v) for v in module.seen) < 1e-6 for step in steps)
    whole = fit(kind(cut=None)).callback_metrics
    name = "called_epoch" if on_step else "called"
    torch.testing.assert_close(ours[name], whole[name])
