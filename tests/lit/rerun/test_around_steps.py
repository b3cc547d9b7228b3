"""What a snapshot keeps, it puts back, as the very objects that were there."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MeanMetric, MetricCollection

from trainkit.lit.rerun.snapshot import Snapshot


class Holder(nn.Module):
    """One of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.tied = self.layer.weight
        self.register_buffer("queue", torch.zeros(3))
        self.register_buffer("hidden", torch.ones(2), persistent=False)
        self.metrics = MetricCollection([MeanMetric(), CatMetric()])
        self.count, self.names = 0, ["a"]
        self.nested = {
            "seen": {1, 2},
            "last": deque([1], maxlen=2),
            "t": (torch.ones(1),),
        }
        self.generator = torch.Generator().manual_seed(1)
        self.numbers = np.random.default_rng(1)
        self.old_numbers = np.random.RandomState(1)
        self.python = random.Random(1)

    def draw(self) -> list[float]:
        return [
            float(torch.rand(1, generator=self.generator)),
            self.numbers.random(),
            self.old_numbers.rand(),
            self.python.random(),
        ]


def change(holder: Holder) -> None:
    with torch.no_grad():
        for tensor in (*holder.parameters(), *holder.buffers()):
            tensor.add_(1)
    holder.layer.weight.grad = torch.ones(2, 2)
    holder.queue = torch.full((3,), 7.0)
    holder.metrics.update(torch.tensor([1.0]))
    holder.count += 1
    holder.names.append("b")
    holder.nested["seen"].add(3)  # type: ignore[union-attr]
    holder.nested["last"].append(5)  # type: ignore[union-attr]
    holder.nested["t"][0].mul_(3)  # type: ignore[index]
    holder.new = 1  # type: ignore[assignment]
    holder.extra = nn.Linear(1, 1)
    del holder.hidden


def state(holder: Holder) -> dict[str, Any]:
    return {
        "tensors": {n: p.tolist() for n, p in holder.named_parameters()}
        | {n: b.tolist() for n, b in holder.named_buffers()},
        "objects": [id(p) for p in (*holder.parameters(), *holder.buffers())],
        "gradient": holder.layer.weight.grad,
        "metrics": {
            name: (each.update_count, str(each.metric_state))
            for name, each in holder.metrics.items()
        },
        "plain": (holder.count, list(holder.names), str(holder.nested)),
        "lists": (id(holder.names), id(holder.nested["seen"])),
        "names": sorted(vars(holder)),
        "modules": sorted(name for name, _ in holder.named_modules()),
    }


def test_everything_comes_back_and_does_so_again() -> None:
    holder = Holder()
    snapshot, before = Snapshot(holder, around_steps=True), state(holder)
    drawn = holder.draw()
    for _ in range(2):
        change(holder)
        assert state(holder) != before
        snapshot.restore()
        assert state(holder) == before
        assert holder.draw() == drawn
    assert holder.tied is holder.layer.weight


def test_a_module_that_was_cast_is_float32_again() -> None:
    """As a `bf16-true` Trainer casts it; the rounding is undone too."""
    module = nn.Linear(3, 3)
    before, weight = module.weight.detach().clone(), module.weight
    snapshot = Snapshot(module, around_steps=True)
    module.to(torch.bfloat16)
    snapshot.restore()
    assert module.weight is weight
    assert torch.equal(module.weight, before)


def test_of_others_the_attributes_and_the_samplers_generators() -> None:
    class Data:
        def __init__(self) -> None:
            self.rows = [torch.zeros(2)]
            generator = torch.Generator().manual_seed(1)
            self.loader = DataLoader(range(9), 3, shuffle=True, generator=generator)  # type: ignore[arg-type]

    data = Data()
    rows = data.rows
    snapshot = Snapshot(others=(data,))
    order = [batch.tolist() for batch in data.loader]
    assert [batch.tolist() for batch in data.loader] != order
    rows[0].add_(1)
    data.rows, data.made = [], True  # type: ignore[attr-defined]
    snapshot.restore()
    assert [batch.tolist() for batch in data.loader] == order
    assert data.rows is rows
    assert not hasattr(data, "made")
    assert rows[0].tolist() == [1, 1], "a data set may be large, and is not copied"
