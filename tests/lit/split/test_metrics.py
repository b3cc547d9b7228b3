"""Metric objects in `training_step` of split windows."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassF1Score,
    MulticlassPrecision,
)
from torchmetrics.wrappers import ClasswiseWrapper, MetricTracker

from tests.helpers import (
    VOCABULARY,
    pad,
    ragged_sequences,
    raise_rank_errors,
    run_ranks,
    trainer,
)
from tests.lit.fronts import cut as parted
from tests.lit.split.common import CUTS, Split, assert_same_logs, logged
from tests.lit.split.short_of_memory import out_of_memory
from trainkit import PerSample, TrainkitError
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.lit.split.logs import WindowMetrics

SAID = "ignore:self.log.*the value of a metric object:UserWarning"
pytestmark = [
    pytest.mark.filterwarnings("ignore:No (positive|negative) samples:UserWarning"),
    pytest.mark.filterwarnings("ignore:You called `self.log:UserWarning"),
    pytest.mark.filterwarnings("ignore:Metric `\\w+` will save all:UserWarning"),
    pytest.mark.filterwarnings(SAID),
]


def accuracy() -> MulticlassAccuracy:
    return MulticlassAccuracy(VOCABULARY, ignore_index=-100, average="micro")


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
    "macro": lambda: MulticlassAccuracy(VOCABULARY, average="macro"),
    "f1": lambda: MulticlassF1Score(VOCABULARY, average="macro"),
    "list states": lambda: MulticlassAUROC(VOCABULARY, average="macro"),
    "full state": FullState,
    "collection": collection,
    "collection without groups": lambda: collection(compute_groups=False),
    "wrapper": lambda: ClasswiseWrapper(MulticlassAccuracy(VOCABULARY, average="none")),
}


class Measured(Split):
    """Calls one metric object of a kind, and updates another."""

    def __init__(self, make: Any, **options: Any) -> None:
        super().__init__(**options)
        self.called, self.updated = make(), make()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        keep = batch["labels"] != -100
        data = self.net(batch["ids"]).detach()[keep], batch["labels"][keep]
        self.called(*data)
        self.updated.update(*data)
        return loss

    def on_train_epoch_end(self) -> None:
        for name in ("called", "updated"):
            metric = getattr(self, name)
            value = metric.compute()
            several = value if isinstance(value, dict) else {"": value}
            self.log_dict({f"{name}/{key}": each for key, each in several.items()})
            metric.reset()


@pytest.mark.parametrize("kind", MAKERS)
def test_the_value_of_an_epoch_is_that_of_whole_batches(kind: str) -> None:
    ours, whole = (
        logged(Measured(MAKERS[kind], cut=cut)) for cut in (CUTS["size"], None)
    )
    assert_same_logs(ours, whole)
    assert any(name.startswith("called/") for name in whole[1])


class Logged(Split):
    """Logs the metric object itself, as Lightning recommends."""

    def __init__(self, on_step: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self.metric, self.on_step, self.seen = accuracy(), on_step, list[float]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        keep = batch["labels"] != -100
        data = self.net(batch["ids"]).detach()[keep], batch["labels"][keep]
        self.seen.append(float(self.metric(*data)))
        self.log("metric", self.metric, on_step=self.on_step, on_epoch=True)
        return loss


def test_the_value_of_a_step_is_the_last_micro_batchs_which_is_said_once() -> None:
    module = Logged(cut=CUTS["size"])
    with pytest.warns(UserWarning, match="the value of a metric object on a") as told:
        rows, metrics = logged(module, max_epochs=1)
    assert len([each for each in told if "metric object" in str(each.message)]) == 1
    steps = [row["metric_step"] for row in rows if "metric_step" in row]
    assert len(steps) < len(module.seen)
    assert all(min(abs(step - v) for v in module.seen) < 1e-6 for step in steps)
    _, whole = logged(Logged(cut=None), max_epochs=1)
    assert metrics["metric_epoch"] == pytest.approx(whole["metric_epoch"], rel=1e-6)


@pytest.mark.filterwarnings("error:self.log.*the value of a metric object:UserWarning")
def test_nothing_is_said_where_no_step_is_logged() -> None:
    ours, whole = (
        logged(Logged(on_step=False, cut=cut)) for cut in (CUTS["size"], None)
    )
    assert_same_logs(ours, whole)


class Tracked(Measured):
    """Has a new metric in each epoch."""

    def __init__(self, **options: Any) -> None:
        super().__init__(MAKERS["macro"], **options)
        self.called = MetricTracker(MAKERS["macro"]())

    def on_train_epoch_start(self) -> None:
        self.called.increment()


def test_metrics_made_in_mid_training_are_known() -> None:
    assert_same_logs(*(logged(Tracked(cut=cut)) for cut in (CUTS["size"], None)))


class Averaged(Split):
    """Feeds the loss to `MeanMetric`s, as templates do, in some ways."""

    FEEDS = ("called", "updated", "number", "weighted", "rows")

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.means = nn.ModuleDict({"mean_" + way: MeanMetric() for way in self.FEEDS})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        counts = (batch["labels"] != -100).sum(1)
        means: Any = self.means
        means["mean_called"](loss)
        means["mean_updated"].update(loss)
        means["mean_number"](loss.item())
        means["mean_weighted"](loss, weight=counts.sum())
        means["mean_rows"](counts.float())
        for name, mean in means.items():
            self.log(name, mean, on_step=False, on_epoch=True)
        return loss


@cache
def averaged(cut: str | None) -> Any:
    return logged(Averaged(cut=CUTS[cut] if cut else None))


@pytest.mark.parametrize("cut", ["size", "rows"])
def test_mean_metric_counts_a_loader_batch_once(cut: str) -> None:
    assert len(averaged(None)[1]) >= len(Averaged.FEEDS)
    assert_same_logs(averaged(cut), averaged(None))


def test_mean_metric_counts_samples_under_per_sample() -> None:
    made = [Averaged(cut=cut) for cut in (CUTS["size"], None)]
    for each in made:
        each.accumulation = PerSample()
    with pytest.raises(AssertionError):  # a mean over tokens, weighed by samples
        assert_same_logs(*map(logged, made))


def test_metric_objects_are_left_as_they_were() -> None:
    module = Averaged()
    mean = module.means["mean_called"]
    update = vars(mean)["update"]
    logged(module)
    assert vars(mean)["update"] is update
    assert not mean._forward_hooks


class Short(Measured):
    """Its memory runs out after its metrics were asked."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.micro_batching is not None and len(batch["ids"]) > 5:
            raise out_of_memory()
        return loss


@pytest.mark.parametrize("kind", ["macro", "list states"])
def test_states_are_right_where_memory_runs_out(kind: str) -> None:
    cuts = MicroBatching("auto"), None
    assert_same_logs(*(logged(Short(MAKERS[kind], cut=cut)) for cut in cuts))


# ---- several ranks -------------------------------------------------------------------

SHARES = [(9, 3, 12, 2), (3, 10, 1, 2)]


class Asking(Measured):
    """Calls `compute` in its step, where ranks have different numbers of parts."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.updated.compute()
        return loss


def data_of(rank: int) -> list[Any]:
    sequences = iter(ragged_sequences(80))
    return [[next(sequences) for _ in range(sum(share))] for share in SHARES][rank]


def on_a_rank(rank: int, world: int) -> Any:
    module, data = Asking(MAKERS["f1"], cut=CUTS["size"]), data_of(rank)
    fitted = trainer(
        strategy=DDPStrategy(process_group_backend="gloo"),
        devices=world,
        use_distributed_sampler=False,
        max_epochs=1,
    )
    batches = parted(data, SHARES[rank])
    fitted.fit(module, DataLoader(data, batch_sampler=batches, collate_fn=pad))  # type: ignore[arg-type]
    return float(fitted.callback_metrics["updated/"])


def test_ranks_with_different_numbers_of_micro_batches_do_not_wait() -> None:
    """Their epoch's value is that of all rows; the nets have trained alike."""
    first, second = raise_rank_errors(run_ranks(on_a_rank, 2))
    assert first == second
    joined, sizes = [], []
    for number in range(len(SHARES[0])):
        for rank, share in enumerate(SHARES):
            begin = sum(share[:number])
            joined += data_of(rank)[begin : begin + share[number]]
        sizes.append(sum(share[number] for share in SHARES))
    module = Asking(MAKERS["f1"], cut=None)
    fitted = trainer(max_epochs=1)
    batches = parted(joined, sizes)
    fitted.fit(module, DataLoader(joined, batch_sampler=batches, collate_fn=pad))  # type: ignore[arg-type]
    whole = float(fitted.callback_metrics["updated/"])
    assert first == pytest.approx(whole, rel=1e-6)


def test_a_metric_that_waits_for_other_ranks_is_refused_on_ranks() -> None:
    module = nn.Module()
    module.metric = MulticlassAccuracy(VOCABULARY, dist_sync_on_step=True)
    WindowMetrics(module, num_ranks=1)
    with pytest.raises(TrainkitError, match="metric metric: with dist_sync_on_step"):
        WindowMetrics(module, num_ranks=2)
