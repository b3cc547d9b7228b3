"""`update`, `compute` and `reset` of metric objects, called in `training_step`."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from functools import cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchmetrics.wrappers import ClasswiseWrapper, MetricTracker, MinMaxMetric

from tests.helpers import (
    NAIVE,
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
from tests.lit.split.test_metrics import MAKERS, QUIET, accuracy, collection
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.lit._compat import forget_computed

pytestmark = QUIET


class Asked(Split):
    """Calls the methods of its metric in one of these orders, and logs the value.

    Args:
        metric: what it has.
        order: r, u, c and f: `reset`, `update`, `compute` (what it gives is logged)
            and a call of the metric.
    """

    def __init__(self, metric: Any, order: str, **options: Any) -> None:
        super().__init__(**options)
        self.metric, self.order = metric, order

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        keep = batch["labels"] != -100
        self.ask(self.net(batch["ids"]).detach()[keep], batch["labels"][keep])
        return loss

    def ask(self, *data: Tensor) -> None:
        self.ask_in_order(self.metric, self.order, *data)

    def ask_in_order(
        self, metric: Any, order: str, *data: Tensor, prefix: str = ""
    ) -> None:
        for number, step in enumerate(order):
            if step == "c":
                self.show(f"{prefix}metric{number}", metric.compute())
            elif step == "r":
                metric.reset()
            else:
                metric.update(*data) if step == "u" else metric(*data)

    def show(self, name: str, value: Any) -> None:
        how: dict[str, Any] = {"on_step": True, "on_epoch": True}
        if isinstance(value, Tensor):
            self.log(name, value, **how)
        else:
            self.log_dict({f"{name}/{k}": v for k, v in value.items()}, **how)


class AskedInEveryOrder(Asked):
    """Has a metric for each of several orders: one training shows them all."""

    def __init__(self, make: Any, orders: Sequence[str], **options: Any) -> None:
        super().__init__(None, "", **options)
        self.metrics = nn.ModuleDict({order: make() for order in orders})

    def ask(self, *data: Tensor) -> None:
        for order, metric in self.metrics.items():
            self.ask_in_order(metric, order, *data, prefix=f"{order}/")


ORDERS = ("uc", "fc", "ucr", "ruc", "ucc", "rfcr", "u", "c")
OF_DICTS = ("uc", "ucr", "ruc", "fc", "fcr")
DICTS: dict[str, Any] = {
    "collection": collection,
    "collection without groups": lambda: collection(compute_groups=False),
    "wrapper": lambda: ClasswiseWrapper(MulticlassAccuracy(VOCABULARY, average="none")),
    "stateful compute": lambda: MinMaxMetric(accuracy()),
}
BEFORE = "ignore:The ``compute`` method of metric"
FEW = (9, 6, 3)
"""Samples in each loader batch: three micro-batches, two, and one."""


@cache
def logged_in_every_order(
    kind: str, orders: tuple[str, ...], cut: str | None, window: int = 1
) -> Any:
    make = (MAKERS | DICTS)[kind]
    module = AskedInEveryOrder(make, orders, cut=CUTS[cut] if cut else None)
    return logged(module, window=window, sizes=FEW)


def of_order(order: str, logs: Any) -> Any:
    """What is logged of one metric."""
    rows, metrics = (
        [{k: v for k, v in row.items() if _is_of(order, k)} for row in part]
        for part in (logs[0], [logs[1]])
    )
    assert "c" not in order or any(k.startswith(f"{order}/") for k in metrics[0])
    return rows, metrics[0]


def _is_of(order: str, name: str) -> bool:
    return name.startswith(f"{order}/") or "/" not in name


@pytest.mark.filterwarnings(BEFORE)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", [kind for kind in MAKERS if kind != "f1"])
def test_computed_value_equals_that_of_the_whole_batch(kind: str, order: str) -> None:
    orders = ORDERS
    if kind == "list states":
        orders = ORDERS[:-1]
        if order == "c":
            pytest.skip("it computes nothing from nothing, with the cut or without")
    ours, whole = (logged_in_every_order(kind, orders, cut) for cut in ("size", None))
    assert_same_logs(of_order(order, ours), of_order(order, whole))


@pytest.mark.filterwarnings(BEFORE)
@pytest.mark.parametrize("order", OF_DICTS)
@pytest.mark.parametrize("kind", DICTS)
def test_computed_dict_equals_that_of_the_whole_batch(kind: str, order: str) -> None:
    orders = OF_DICTS
    if kind == "stateful compute":
        orders = OF_DICTS[:3]
        if "f" in order:
            pytest.skip("what it keeps it takes from each call's value")
    ours, whole = (logged_in_every_order(kind, orders, cut) for cut in ("size", None))
    assert_same_logs(of_order(order, ours), of_order(order, whole))


@pytest.mark.parametrize(
    ("cut", "window"), [("tokens", 2), ("rows", 1), ("auto", 1), ("auto", 2)]
)
def test_however_it_is_cut(cut: str, window: int) -> None:
    ours, whole = (
        logged_in_every_order("macro", ("uc", "ucr"), how, window)
        for how in (cut, None)
    )
    assert_same_logs(ours, whole)


def test_value_of_the_micro_batches_is_another() -> None:
    """Negative control: a number that is made from it cannot be told from others."""

    class Number(Asked):
        def show(self, name: str, value: Any) -> None:
            super().show(name, value * 1)

    (ours, _), (whole, _) = (
        logged(Number(accuracy(), "uc", cut=cut)) for cut in (CUTS["size"], None)
    )
    assert ours[0]["metric1_step"] != pytest.approx(whole[0]["metric1_step"], rel=NAIVE)


class Averaged(Asked):
    """Averages its loss, and keeps an inventory of metrics under names."""

    def __init__(self, **options: Any) -> None:
        super().__init__(MeanMetric(), "", **options)
        self.inventory = nn.ModuleDict({"a": accuracy(), "b": MAKERS["macro"]()})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.metric.update(loss)
        self.show("mean", self.metric.compute())
        keep = batch["labels"] != -100
        data = {"preds": batch["ids"][keep], "target": batch["labels"][keep]}
        inventory: Any = self.inventory
        for name, metric in inventory.items():
            metric.update(**data)
            self.show(name, metric.compute())
            self.log(f"{name}/object", metric, on_step=False, on_epoch=True)
        return loss


def test_mean_of_losses_dict_of_metrics_and_named_arguments() -> None:
    ours, whole = (logged(Averaged(cut=cut)) for cut in (CUTS["size"], None))
    assert_same_logs(ours, whole)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not")
def test_compiled_module_logs_what_the_whole_batch_gives() -> None:
    """Calls of metric objects are not traced: their state would be guarded."""
    ours, whole = (
        AskedInEveryOrder(MAKERS["full state"], ("ucr", "fc"), cut=cut)
        for cut in (CUTS["size"], None)
    )
    compiled: Any = torch.compile(ours, backend="eager", dynamic=True)
    sizes = (8, 6, 3)  # no micro-batch is a single row, which is compiled by itself
    assert_same_logs(*(logged(each, sizes=sizes) for each in (compiled, whole)))


class Tracked(Asked):
    """Has a new metric in each epoch."""

    def on_train_epoch_start(self) -> None:
        self.metric.increment()


@pytest.mark.parametrize("order", ["uc", "ruc", "fc"])
def test_metrics_made_in_mid_training_are_known(order: str) -> None:
    modules = [
        Tracked(MetricTracker(MAKERS["macro"]()), order, cut=cut)
        for cut in (CUTS["size"], None)
    ]
    assert_same_logs(*(logged(module, sizes=FEW) for module in modules))


@pytest.mark.parametrize("order", ["ucu", "cuc", "ucruc"])
def test_what_no_single_state_can_give_is_announced_once(order: str) -> None:
    with pytest.warns(UserWarning, match="metric metric: training_step adds") as told:
        logged(Asked(MAKERS["macro"](), "u" + order, cut=CUTS["size"]), sizes=FEW)
    assert len([each for each in told if "adds to it" in str(each.message)]) == 1
    logged(Asked(MAKERS["macro"](), "u" + order, cut=None), sizes=FEW)


class Copying(Asked):
    """Makes copies of its metric while a window runs."""

    def show(self, name: str, value: Any) -> None:
        super().show(name, value)
        for made in (self.metric.clone(), copy.deepcopy(self.metric)):
            made.reset()
            made.update(torch.tensor([1]), torch.tensor([1]))
            made(torch.tensor([1]), torch.tensor([2]))
            assert float(made.compute()) == 0.5
            self.copied = made


def test_copies_made_in_a_step_are_on_their_own() -> None:
    modules = [Copying(accuracy(), "uc", cut=cut) for cut in (CUTS["size"], None)]
    assert_same_logs(*map(logged, modules))
    again = pickle.loads(pickle.dumps(modules[0].copied))
    assert float(again.compute()) == 0.5


def test_nothing_is_left_on_the_metric_objects() -> None:
    module = Asked(collection(), "fcr")
    before = {k: dict(vars(m)) for k, m in module.metric.items()}
    logged(module)
    for name, metric in module.metric.items():
        assert vars(metric).keys() == before[name].keys()
        for kept in ("update", "compute", "distributed_available_fn"):
            assert vars(metric)[kept] is before[name][kept]
        assert not metric._forward_hooks
        pickle.loads(pickle.dumps(metric))


class Short(AskedInEveryOrder):
    """Its memory runs out after its metrics were asked."""

    def ask(self, *data: Tensor) -> None:
        super().ask(*data)
        if self.micro_batching is not None and len(self.last) > 5:
            raise out_of_memory()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.last = batch["ids"]
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("kind", "orders"),
    [("macro", ("uc", "ruc")), ("list states", ("ucr", "ruc"))],
)
def test_states_are_right_where_memory_runs_out(
    kind: str, orders: tuple[str, ...]
) -> None:
    auto = MicroBatching("auto")
    modules = [Short(MAKERS[kind], orders, cut=cut) for cut in (auto, None)]
    assert_same_logs(*(logged(module, sizes=FEW) for module in modules))


# ---- several ranks -------------------------------------------------------------------

SHARES = [(9, 3, 12, 2), (3, 10, 1, 2)]


class Steps(pl.Callback):
    """Keeps what each step has logged."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.values.append(float(trainer.callback_metrics["metric_step"]))


class Shared(Asked):
    """Logs its metric's value under one name, whatever the order."""

    def show(self, name: str, value: Any) -> None:
        self.log("metric", value, on_step=True, on_epoch=True)


def f1() -> MulticlassF1Score:
    return MulticlassF1Score(VOCABULARY, average="macro")


def on_ranks(rank: int, world: int, orders: list[str]) -> dict[str, list[float]]:
    sequences = iter(ragged_sequences(80))
    data = [[next(sequences) for _ in range(sum(share))] for share in SHARES][rank]
    found = {}
    for order in orders:
        steps, module = Steps(), Shared(f1(), order, cut=CUTS["size"])
        fitted = trainer(
            callbacks=[steps],
            strategy=DDPStrategy(process_group_backend="gloo"),
            devices=world,
            use_distributed_sampler=False,
            max_epochs=1,
        )
        batches = parted(data, SHARES[rank])
        fitted.fit(module, DataLoader(data, batch_sampler=batches, collate_fn=pad))  # type: ignore[arg-type]
        found[order] = steps.values
    return found


def in_one_process(order: str) -> list[float]:
    """Each step with the loader batches of all ranks as one."""
    sequences = iter(ragged_sequences(80))
    data = [[next(sequences) for _ in range(sum(share))] for share in SHARES]
    joined, sizes = [], []
    for number in range(len(SHARES[0])):
        for rank, share in enumerate(SHARES):
            first = sum(share[:number])
            joined += data[rank][first : first + share[number]]
        sizes.append(sum(share[number] for share in SHARES))
    steps, module = Steps(), Shared(f1(), order, cut=None)
    fitted = trainer(callbacks=[steps], max_epochs=1)
    batches = parted(joined, sizes)
    fitted.fit(module, DataLoader(joined, batch_sampler=batches, collate_fn=pad))  # type: ignore[arg-type]
    return steps.values


def test_ranks_with_different_numbers_of_micro_batches_compute_together() -> None:
    orders = ["uc", "ucr", "ruc", "ucc"]
    results = raise_rank_errors(run_ranks(on_ranks, 2, orders))
    for order in orders:
        whole = in_one_process(order)
        assert len(set(whole)) > 1
        for result in results:
            assert result[order] == pytest.approx(whole, rel=1e-6)


def test_metric_computes_anew_when_it_has_forgotten() -> None:
    metric = accuracy()
    metric.update(torch.tensor([1]), torch.tensor([1]))
    before = metric.compute()
    assert metric.compute() is before
    forget_computed(metric)
    assert metric.compute() is not before
