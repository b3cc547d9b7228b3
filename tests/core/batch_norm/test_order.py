"""Layers are taken in the order in which they feed one another, batch by batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.core.batch_norm.nets import (
    furthest,
    images,
    of_big_batch,
    ragged,
    statistics,
)
from trainkit.core.batch_norm.layers import every_layer
from trainkit.core.batch_norm.recalibration import recalibrate

EXACT = 1e-10
X = images().flatten(1)[:, :5]


def normal(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, 5, generator=generator, dtype=torch.float64)


class Backwards(nn.Module):
    """Defines last what it calls first."""

    def __init__(self) -> None:
        super().__init__()
        self.third = nn.BatchNorm1d(5)
        self.second = nn.BatchNorm1d(5)
        self.first = nn.BatchNorm1d(5)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for seed, layer in enumerate((self.first, self.second, self.third)):
            x = torch.tanh(layer(x @ normal(seed)))
        return x


def test_layers_defined_backwards_equal_all_rows_as_one_batch() -> None:
    net = Backwards()
    wanted = of_big_batch(net, X)
    recalibrate(every_layer(net), lambda: ragged(X), net)
    assert furthest(statistics(net), wanted) <= EXACT


class Domains(nn.Module):
    """A BatchNorm for each domain, before those that all share: a micro-batch is of one
    domain, and leaves the others' layers out."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.BatchNorm1d(5), nn.Tanh(), nn.BatchNorm1d(5))
        self.domains = nn.ModuleList(nn.BatchNorm1d(5) for _ in range(3))
        self.double()

    def forward(self, batch: list[tuple[int, Tensor]]) -> Tensor:
        parts = [torch.tanh(self.domains[number](x)) for number, x in batch]
        return self.trunk(torch.cat(parts))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_layers_that_batches_leave_out_equal_all_rows_as_one_batch(order: Any) -> None:
    parts = list(enumerate(ragged(X, (9, 7, 7))))
    net = Domains()
    wanted = of_big_batch(net, parts)
    recalibrate(every_layer(net), lambda: [[parts[i]] for i in order], net)
    assert furthest(statistics(net), wanted) <= EXACT


def test_empty_micro_batch_changes_nothing() -> None:
    net = Backwards()
    wanted = of_big_batch(net, X)
    parts = [X[:0], *ragged(X), X[:0]]
    recalibrate(every_layer(net), lambda: parts, net)
    assert furthest(statistics(net), wanted) <= EXACT
