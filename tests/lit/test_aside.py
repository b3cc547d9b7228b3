"""What a step that does not count has changed is put back."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn
from torchmetrics import MeanMetric

from trainkit.lit.aside import Kept, muted

CPU = torch.device("cpu")


class Meter:
    """As people write their own."""

    def __init__(self) -> None:
        self.total = 0.0


class Frozen(dict[str, int]):
    """As configurations are."""

    def update(self, *_: Any, **named: Any) -> None:
        raise TypeError("it is frozen")


class Rich(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(2))
        self.metric = MeanMetric()
        self.number, self.text = 1, "a"
        self.held = {"list": [1, 2], "set": {3}, "deque": deque([4])}
        self.ordered, self.config = OrderedDict(a=1), Frozen(a=1)
        self.array, self.tensor = np.zeros(2), torch.zeros(2)
        self.own, self.numpys = random.Random(0), np.random.default_rng(0)
        self.torchs = torch.Generator().manual_seed(0)

    def change(self) -> None:
        self.mean += 1
        self.mean = 2 * self.mean
        self.metric.update(3.0)
        self.number, self.text, self.later = 2, "b", 5
        self.held["list"].append(9)
        self.held["set"].clear()
        self.held["deque"].popleft()
        self.ordered["b"] = 2
        self.array += 1
        self.tensor += 1
        self.draw()

    def draw(self) -> list[float]:
        return [
            self.own.random(), float(self.numpys.random()), random.random(),
            float(torch.rand(1, generator=self.torchs)), float(torch.rand(1)),
            float(np.random.rand()),
        ]  # fmt: skip

    def state(self) -> Any:
        held = self.held
        return (
            self.mean.tolist(), float(self.metric.mean_value), self.metric.update_count,
            self.number, self.text,
            hasattr(self, "later"), list(held["list"]), set(held["set"]),
            list(held["deque"]), dict(self.ordered), self.array.tolist(),
            self.tensor.tolist(),
        )  # fmt: skip


def test_all_that_a_module_holds_is_put_back() -> None:
    module = Rich()
    before, lists = module.state(), module.held["list"]
    mean = module.mean
    snapshot = Kept(module, device=CPU)
    for _ in range(2):  # it can be put back again
        module.change()
        assert module.state() != before
        snapshot.restore()
        assert module.state() == before
    assert module.held["list"] is lists
    assert module.mean is mean
    drawn = module.draw()
    snapshot.restore()
    assert module.draw() == drawn


def test_generators_can_be_left() -> None:
    module = Rich()
    first = module.draw()[0]
    module.own.seed(0)
    with Kept(module, generators=False):
        module.change()
    assert module.mean.tolist() == [0, 0]
    assert module.number == 1
    assert module.draw()[0] != first


def test_what_objects_hold_is_left_as_it_is() -> None:
    module: Any = Rich()
    module.meter = Meter()
    with Kept(module):
        module.meter.total = 7.0
        module.held["deep"] = [module.held]
    assert module.meter.total == 7.0
    assert "deep" not in module.held


def test_nothing_is_logged_while_muted() -> None:
    module = Rich()
    module.log = own = lambda *_, **__: 1 / 0  # type: ignore[method-assign,assignment]
    with muted(module):
        module.log("a", 1.0)
        module.log_dict({"a": 1.0})
    assert module.log is own
    assert "log_dict" not in vars(module)
