"""The window's gradient in float32 beside bfloat16 parameters, by Lightning."""

from __future__ import annotations

from functools import cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from tests.helpers import (
    TokenNet,
    gradients,
    loader,
    ragged_sequences,
    token_loss,
    trainer,
    weights,
)
from trainkit import (
    AccumulationCallback,
    AccumulationMixin,
    Accumulator,
    MicroBatching,
    PerToken,
    TrainkitError,
)

SEQUENCES = ragged_sequences(64, longest=30)


class Plain(pl.LightningModule):
    """Keeps the gradients of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.net = TokenNet()
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return token_loss(self.net, batch)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert all(
            p.grad.dtype == p.dtype for p in self.parameters() if p.grad is not None
        )
        self.seen.append(gradients(self))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Mixed(AccumulationMixin, Plain):
    accumulation = PerToken()


@cache
def exact_gradient() -> Tensor:
    """Of the weights as bfloat16 has them, in float64, over one micro-batch a row."""
    net = TokenNet().bfloat16()
    total = torch.zeros_like(weights(net))
    count = 0
    for batch in loader(SEQUENCES, 1):
        weight = int((batch["labels"] != -100).sum())
        net.zero_grad()
        token_loss(net, batch).backward()
        total += gradients(net) * weight
        count += weight
    return total / count


def error_of(module: Plain, batch_size: int, accumulate: int, **options: Any) -> float:
    fit = trainer(accumulate, precision="bf16-true", max_epochs=1, **options)
    fit.fit(module, loader(SEQUENCES, batch_size))
    exact = exact_gradient()
    return float((module.seen[0] - exact).norm() / exact.norm())


def by_callback(wide: bool) -> float:
    callback = AccumulationCallback(PerToken(), wide_gradients=wide)
    return error_of(Plain(), 1, 64, callbacks=[callback])


def by_mixin(wide: bool) -> float:
    module = Mixed()
    module.wide_gradients = wide
    return error_of(module, 1, 64)


def by_split(wide: bool) -> float:
    module = Mixed()
    module.wide_gradients = wide
    module.micro_batching = MicroBatching(size=1)
    return error_of(module, 64, 1)


@pytest.mark.parametrize("front", [by_callback, by_mixin, by_split])
def test_window_of_64_loses_less_than_in_bfloat16(front: Any) -> None:
    """What is left is one rounding, and that of each weighted micro-batch."""
    wide, own = front(True), front(False)
    assert wide < 4e-3
    assert own > 1.5 * wide


def test_is_refused_under_a_gradient_scaler(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Mixed()
    module.wide_gradients = True
    scaler = torch.amp.GradScaler("cpu")
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    fit = trainer(2, plugins=[plugin])
    with pytest.raises(TrainkitError, match="wide_gradients=True: under a gradient"):
        fit.fit(module, loader(SEQUENCES, 4))


def test_a_window_in_a_checkpoint_goes_on_exactly() -> None:
    batches = list(loader(SEQUENCES, 8))

    def run(interrupted: bool) -> Tensor:
        net: nn.Module = TokenNet().bfloat16()
        accumulator = Accumulator(PerToken(), module=net, wide_gradients=True)
        for index, batch in enumerate(batches):
            if interrupted and index == 5:
                state = accumulator.state_dict()
                net = TokenNet().bfloat16()
                accumulator = Accumulator(PerToken(), module=net, wide_gradients=True)
                accumulator.load_state_dict(state)
            accumulator.backward(token_loss(net, batch), batch)
        accumulator.finish(net.parameters())
        return gradients(net)

    assert torch.equal(run(True), run(False))


def test_accumulator_needs_its_module() -> None:
    with pytest.raises(TrainkitError, match="wide_gradients=True: needs the module"):
        Accumulator(PerToken(), wide_gradients=True)


@pytest.mark.parametrize("tells", [True, False])
def test_accumulator_in_a_plain_loop(tells: bool) -> None:
    """Told beforehand or streamed, with the sums dropped once on the way."""
    errors = []
    for wide in (True, False):
        net: nn.Module = TokenNet().bfloat16()
        accumulator = Accumulator(PerToken(), module=net, wide_gradients=wide)
        batches = list(loader(SEQUENCES, 1))
        accumulator.backward(token_loss(net, batches[0]), batches[0])
        accumulator.drop()
        net.zero_grad()
        if tells:
            accumulator.expect(batches)
        for batch in batches:
            accumulator.backward(token_loss(net, batch), batch)
        accumulator.finish(net.parameters())
        exact = exact_gradient()
        errors.append(float((gradients(net) - exact).norm() / exact.norm()))
    assert errors[0] < 4e-3
    assert errors[1] > 1.5 * errors[0]
