"""The gradient of a recipe's window, against that of its rows as one batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from tests.helpers import TOLERANCE, gradients
from trainkit import AccumulationStrategy, Accumulator

EXACT = TOLERANCE[torch.float64]


def window_gradient(
    module: nn.Module, loss_of: Any, batches: list[Any], strategy: Any
) -> Tensor:
    """Of micro-batches, weighed by a strategy or by one for each term."""
    module = copy.deepcopy(module)
    accumulator = Accumulator(strategy)
    if isinstance(strategy, dict):
        accumulator.expect(batches)
    for batch in batches:
        accumulator.backward(loss_of(module, batch), batch)
    accumulator.finish(list(module.parameters()))
    return gradients(module)


def whole_gradient(module: nn.Module, loss_of: Any, batch: Any) -> Tensor:
    """Of one batch, by autograd alone."""
    module = copy.deepcopy(module)
    loss = loss_of(module, batch)
    terms = list(loss.values()) if isinstance(loss, dict) else [loss]
    torch.stack(terms).sum().backward()
    return gradients(module)


def off(gradient: Tensor, reference: Tensor) -> float:
    """The distance as a share of the reference's norm."""
    return float((gradient - reference).norm() / reference.norm())


def doubled(batch: Any) -> Any:
    """A batch in float64."""
    if isinstance(batch, dict):
        return {name: doubled(value) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [doubled(value) for value in batch]
    return batch.double() if torch.is_floating_point(batch) else batch


def alone(module: LightningModule) -> LightningModule:
    """A module in float64 whose step runs without a Trainer: in one process."""
    module.all_gather = lambda data, **_: data  # type: ignore[method-assign]
    module.log = lambda *_, **__: None  # type: ignore[method-assign]
    return module.double()


def window_is_off_by(
    module: LightningModule,
    strategy: AccumulationStrategy,
    rows: Sequence[Any],
    collate: Callable[[Any], Any],
    *,
    cuts: Sequence[int],
) -> float:
    """How far a window of rows that are collated in these cuts is from one batch."""
    assert sum(cuts) == len(rows)
    ends = torch.tensor([0, *cuts]).cumsum(0).tolist()
    batches = [collate(rows[a:b]) for a, b in zip(ends, ends[1:], strict=False)]

    def loss_of(each: Any, batch: Any) -> Any:
        return each.training_step(batch, 0)

    return off(
        window_gradient(module, loss_of, batches, strategy),
        whole_gradient(module, loss_of, collate(rows)),
    )
