"""What a window changes is put back, and what it does not change is left alone."""

from __future__ import annotations

import random
import threading
from collections import Counter, OrderedDict, deque
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from trainkit.lit.rerun.gradients import KeptGradients, StashedGradients
from trainkit.lit.rerun.snapshot import Snapshot, container_keeper, kept

CPU = torch.device("cpu")


class Meter:
    """As people write their own."""

    def __init__(self) -> None:
        self.count, self.values = 0, [[0.0]]

    def update(self) -> None:
        self.count += 1
        self.values[0].append(1.0)
        self.last = self.count


class Worker(Meter):
    """Another thread may be changing it."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.mean = MeanMetric()
        self.both = MetricCollection(
            {"a": MulticlassAccuracy(3), "b": MulticlassAccuracy(3, average="micro")}
        )
        self.register_buffer("moving", torch.zeros(2))
        self.number, self.flag, self.text, self.nothing = 1, False, "a", None
        self.tensor = torch.zeros(2)
        self.losses: list[Any] = [torch.ones(())]
        self.recent = deque([1, 2], maxlen=2)
        self.seen = {"ids": {1}, "sums": {"x": torch.zeros(())}}
        self.given = object()
        self.meter, self.meters = Meter(), [{"a": Meter()}]
        self.seen["self"] = self.seen


def changed(model: Any) -> None:
    """All that a training step may do."""
    model.norm(model.layer(torch.randn(4, 2)))
    model.mean(torch.tensor(3.0))
    model.both(torch.tensor([0, 1]), torch.tensor([0, 2]))
    model.moving = 0.5 * model.moving + 1
    model.number += 1
    model.flag, model.text, model.nothing = True, "b", torch.ones(())
    model.tensor += 1
    model.losses.append(torch.ones(()))
    model.recent.append(3)
    model.seen["ids"].add(2)
    model.seen["sums"]["x"] += 1
    model.seen["new"] = 1
    model.meter.update()
    model.meters[0]["a"].update()
    model.layer.made_late = 5
    random.random()
    np.random.rand()
    torch.rand(())


def shown(model: Any) -> Any:
    return repr(
        [
            {name: b.tolist() for name, b in model.named_buffers()},
            (model.number, model.flag, model.text, model.nothing, model.tensor),
            [vars(each) for each in (model.meter, model.meters[0]["a"])],
            (model.losses, model.recent, model.seen, hasattr(model.layer, "made_late")),
            (model.mean.update_count, model.mean.metric_state, model.mean._computed),
            [(m.update_count, m.metric_state) for m in model.both.values()],
            (random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()),
        ]
    )


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_all_is_put_back_as_often_as_it_is_asked() -> None:
    model = Model()
    changed(model)
    before, snapshot = shown(model), Snapshot(model, device=CPU)
    for _ in range(2):
        changed(model)
        assert shown(model) != before
        snapshot.restore()
        assert shown(model) == before


def test_the_same_objects_are_put_back() -> None:
    """An optimizer, a callback or the user may hold them too."""
    model = Model()
    names = ("moving", "tensor", "losses", "recent", "seen", "given")
    held = {name: getattr(model, name) for name in names}
    snapshot = Snapshot(model)
    changed(model)
    snapshot.restore()
    assert all(getattr(model, name) is held[name] for name in names)


def test_what_another_thread_may_change_is_left_alone() -> None:
    model: Any = Model()
    model.worker = Worker()
    snapshot = Snapshot(model)
    model.worker.update()
    snapshot.restore()
    assert model.worker.count == 1


def test_weights_and_gradients_are_not_touched() -> None:
    model = Model()
    snapshot = Snapshot(model)
    model.layer(torch.ones(1, 2)).sum().backward()
    gradient = model.layer.weight.grad
    with torch.no_grad():
        model.layer.weight += 1
    after = model.layer.weight.clone()
    snapshot.restore()
    assert torch.equal(model.layer.weight, after)
    assert model.layer.weight.grad is gradient


def test_an_attribute_that_a_step_makes_and_a_failing_metric_leave_nothing() -> None:
    """A metric that fails in its forward leaves flags that would keep its epoch's
    value from being brought together over ranks."""
    model = Model()
    snapshot = Snapshot(model)
    model.mean._to_sync = False
    model.mean.made_late = 1  # type: ignore[assignment]
    snapshot.restore()
    assert model.mean._to_sync is True
    assert not hasattr(model.mean, "made_late")


@pytest.mark.parametrize("are_kept", [True, False])
def test_generators_of_its_own_are_put_back_with_the_others(are_kept: bool) -> None:
    model: Any = Model()
    model.numbers, model.python = np.random.default_rng(0), random.Random(0)
    model.seen["generator"] = torch.Generator().manual_seed(0)

    def draw() -> tuple[float, ...]:
        own = torch.rand((), generator=model.seen["generator"])
        others = model.numbers.random(), model.python.random()
        return float(own), *others, float(torch.rand(()))

    snapshot = Snapshot(model, generators=are_kept, device=CPU if are_kept else None)
    first = draw()
    snapshot.restore()
    assert [a == b for a, b in zip(first, draw(), strict=True)] == [are_kept] * 4


@pytest.mark.parametrize("sparse", [False, True])
def test_kept_gradients_can_be_begun_with_again(sparse: bool) -> None:
    table = nn.Embedding(4, 2, sparse=sparse)
    unused = nn.Parameter(torch.ones(1))
    parameters = [table.weight, unused]
    table(torch.tensor([1])).sum().backward()
    kept = KeptGradients(parameters)
    for _ in range(2):
        table(torch.tensor([2, 3])).sum().backward()
        unused.grad = torch.ones(1)
        kept.restore()
        assert table.weight.grad is not None
        assert unused.grad is None
        dense = table.weight.grad
        dense = dense.to_dense() if sparse else dense
        assert dense.sum(1).tolist() == [0, 2, 0, 0]


def test_gradients_put_aside_come_back_as_they_were() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = gradient = torch.full((2,), 3.0)
    aside = StashedGradients([weight])
    assert weight.grad is None
    aside.put_back()
    assert weight.grad is gradient


def test_what_is_left_out_stays_as_it_is() -> None:
    """As the layers that a recalibration writes to."""
    model: Any = Model()
    with kept(model, leave_out=[model.norm], only_buffers=True):
        changed(model)
    assert model.norm.num_batches_tracked == 1
    assert model.number == 2
    assert model.moving.tolist() == [0, 0]


class Ring(deque[int]):
    """Made with other arguments than its base."""

    def __init__(self, size: int) -> None:
        super().__init__(maxlen=size)


class Frozen(list[int]):
    """It cannot be emptied by accident."""

    def clear(self) -> None:
        raise TypeError("frozen")


class Ordered(OrderedDict[str, int]):
    def __init__(self, size: int) -> None:
        super().__init__(a=size)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("around_steps", [True, False])
def test_containers_of_the_users_own_kinds_are_put_back(around_steps: bool) -> None:
    model: Any = Model()
    model.ring, model.frozen, model.ordered = Ring(2), Frozen([1]), Ordered(1)
    model.counts = Counter("aab")
    model.chain = ()
    for _ in range(3000):
        model.chain = (model.chain,)
    model.long = tuple(range(100_000))
    model.nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    if around_steps:
        del model.chain  # it is kept in full there
    with kept(model, around_steps=around_steps):
        model.ring.extend([1, 2, 3])
        model.frozen.append(2)
        model.ordered["b"] = 2
        model.ordered.move_to_end("a")
        model.counts["a"] += 1
        model.nested.mul_(2)
    assert (list(model.ring), model.ring.maxlen) == ([], 2)
    assert model.frozen == [1]
    assert list(model.ordered.items()) == [("a", 1)]
    assert model.counts == Counter("aab")
    assert [each.tolist() for each in model.nested.unbind()] == [[1.0], [1.0, 1.0]]


def test_a_module_in_a_list_is_kept_too() -> None:
    """As a teacher that is no submodule, so that no optimizer and no checkpoint has
    it."""
    model: Any = Model()
    model.teachers = [nn.BatchNorm1d(2)]
    with kept(model):
        model.teachers[0](torch.randn(4, 2))
    assert model.teachers[0].num_batches_tracked == 0


def test_a_container_is_read_without_code_of_its_own() -> None:
    """As `ACT2FN` of transformers, which makes a layer of each class that it holds."""

    class Making(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            raise TypeError("it needs arguments")

    made = Making(one=int)
    put_back, kept = container_keeper(made)
    assert kept == {"one": int}
    dict.clear(made)
    put_back()
    assert list(dict.items(made)) == [("one", int)]
