"""Gradients zeroed inside a window by the module or a callback: refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch import Callback

from tests.helpers import TokenModule, loader, ragged_sequences, trainer
from tests.lit.fronts import plain_token_loss
from trainkit import (
    AccumulationCallback,
    AccumulationMixin,
    MicroBatching,
    PerToken,
)
from trainkit.errors import TrainkitError

pytestmark = pytest.mark.filterwarnings(
    "ignore:accumulation. an open window of:UserWarning"
)
DATA = ragged_sequences(32)
GONE = r"the gradients of the \d micro-batches in it are gone"
ZEROINGS: dict[str, Callable[[Any], None]] = {
    "module": lambda m: m.zero_grad(set_to_none=False),
    "net": lambda m: m.net.zero_grad(),
    "optimizer": lambda m: m.optimizers().zero_grad(set_to_none=False),
}


class Zeroes(TokenModule):
    def __init__(self, zeroing: str) -> None:
        super().__init__()
        self.zeroing = zeroing
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        if self.calls == 3:
            ZEROINGS[self.zeroing](self)
        return super().training_step(batch, batch_idx)


class MixedZeroes(AccumulationMixin, Zeroes):
    accumulation = PerToken()


class SplitZeroes(MixedZeroes):
    micro_batching = MicroBatching(size=2)


class Manual(MixedZeroes):
    def __init__(self, zeroing: str) -> None:
        super().__init__(zeroing)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.calls += 1
        if self.calls == 3:
            ZEROINGS[self.zeroing](self)
        self.accumulate(plain_token_loss(self.net, batch), batch)
        if self.window_ends(batch_idx):
            self.finish_window()
            optimizer: Any = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("zeroing", ZEROINGS)
@pytest.mark.parametrize("kind", [Zeroes, MixedZeroes, SplitZeroes, Manual])
def test_zeroing_inside_a_window_is_refused(kind: Any, zeroing: str) -> None:
    """In automatic optimization 1.9 of the distance travelled, in manual 0.52."""
    ours = [AccumulationCallback(PerToken())] if kind is Zeroes else []
    fit = trainer(1 if kind is SplitZeroes else 4, callbacks=ours)
    with pytest.raises(TrainkitError, match=GONE):
        fit.fit(kind(zeroing), loader(DATA, 8 if kind is SplitZeroes else 4))


class ZeroesAfterBackward(Callback):
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        pl_module.zero_grad(set_to_none=False)


def test_zeroing_after_the_last_backward_is_refused_too() -> None:
    ours = [AccumulationCallback(PerToken()), ZeroesAfterBackward()]
    fit = trainer(1, callbacks=ours)
    with pytest.raises(TrainkitError, match=GONE):
        fit.fit(TokenModule(), loader(DATA, 4))
