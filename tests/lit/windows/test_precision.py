"""Half precision equals the big batch up to its rounding, or nearly up to float32's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import (
    NAIVE,
    TOLERANCE,
    TokenNet,
    deviation,
    gradients,
    loader,
    ragged_sequences,
    token_loss,
    trainer,
    weights,
)
from tests.lit.fronts import RAGGED, SEQUENCES, big_batch, fit, merged
from tests.zoo.callbacks import Gradients
from tests.zoo.modules import Plain, on_front, scaled
from trainkit import AccumulationStrategy, MicroBatching, PerToken, TrainkitError

DTYPE = {
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    "16-mixed": torch.float16,
    "16-true": torch.float16,
}
FLOAT: dict[str, Any] = {"dtype": torch.float32}
START = weights(Plain(**FLOAT))


@dataclass(frozen=True)
class Heavy(AccumulationStrategy):
    """Tokens that each weigh much: a micro-batch weighs 50,000 and more."""

    each: float = 5000.0

    def weight(self, batch: Any) -> Tensor:
        return PerToken().weight(batch) * self.each  # type: ignore[operator]


def precise(precision: str, **scaler: Any) -> dict[str, Any]:
    """Trainer options; `16-mixed` with a real gradient scaler, on the CPU."""
    if precision != "16-mixed":
        return {"precision": precision}
    return scaled(**{"init_scale": 2.0**16, **scaler})


# AdamW's eps of 1e-8 is 0 in float16, with or without trainkit.
@pytest.mark.parametrize(
    ("precision", "optimizer"),
    [
        ("bf16-mixed", "sgd"),
        ("bf16-mixed", "adamw"),
        ("bf16-true", "momentum"),
        ("16-mixed", "sgd"),
        ("16-mixed", "adamw"),
        ("16-true", "momentum"),
    ],
)
def test_half_precision_equals_big_batch(precision: str, optimizer: str) -> None:
    """Up to the rounding of its dtype, the same for weights of 1 and of 5,000; mixed
    precision that of float32, too."""

    def train(front: str, *, strategy: Any = None, **how: Any) -> Any:
        made: dict[str, Any] = {**FLOAT, "optimizer": optimizer}
        made |= {"strategy": strategy} if strategy else {}
        return fit(front, made=made, **precise(precision), **how).lightning_module

    big, naive = train("plain", sizes=merged(RAGGED), window=1), train("plain")
    tolerance = TOLERANCE[DTYPE[precision]]
    if optimizer == "adamw":
        tolerance *= 3  # it takes the sign of what rounding leaves of small gradients
    for strategy in (PerToken(), Heavy()):
        module = train("callback", strategy=strategy)
        off = deviation(module, big, START)
        assert off <= tolerance
        assert deviation(naive, big, START) > max(NAIVE, 3 * off)
        if "mixed" in precision:
            full = big_batch(SEQUENCES, optimizer=optimizer, dtype=torch.float32).end
            assert deviation(module, full, START) <= tolerance


# ---- wide gradients: float32 beside bfloat16 parameters ------------------------------


MANY = ragged_sequences(64, longest=30)


def exact_gradient() -> Tensor:
    """Of the weights as bfloat16 has them, in float64, over one micro-batch a row."""
    net = TokenNet().bfloat16()
    total, count = torch.zeros_like(weights(net)), 0
    for batch in loader(MANY, 1):
        weight = int((batch["labels"] != -100).sum())
        net.zero_grad()
        token_loss(net, batch).backward()
        total += gradients(net) * weight
        count += weight
    return total / count


def by_trainer(front: str, wide: bool, cut: MicroBatching | None = None) -> Tensor:
    options = {"wide_gradients": wide}
    how: dict[str, Any] = {"loss": token_loss, **FLOAT, "options": options, "cut": cut}
    module, ours = on_front(front, **how)
    seen = Gradients()
    size, window = (64, 1) if cut else (1, 64)
    options = {"precision": "bf16-true", "max_epochs": 1, "callbacks": [*ours, seen]}
    trainer(window, **options).fit(module, loader(MANY, size))
    assert all(p.grad is None or p.grad.dtype == p.dtype for p in module.parameters())
    return seen.seen[0]


@pytest.mark.parametrize(
    ("front", "cut"), [("callback", None), ("mixin", MicroBatching(size=1))]
)
def test_window_of_64_loses_less_than_in_bfloat16(front: str, cut: Any) -> None:
    """What is left is one rounding, and that of each weighted micro-batch."""
    exact = exact_gradient()
    ends = [by_trainer(front, wide, cut) for wide in (True, False)]
    wide, own = (float((end - exact).norm() / exact.norm()) for end in ends)
    assert wide < 4e-3
    assert own > 1.5 * wide


def test_wide_gradients_that_cannot_be_are_refused() -> None:
    with pytest.raises(TrainkitError, match="wide_gradients=True: under a gradient"):
        fit("mixin", made={**FLOAT, "options": {"wide_gradients": True}}, **scaled())
