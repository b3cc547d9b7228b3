"""Training in half precision, with a real gradient scaler on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tests.zoo import scaled
from trainkit import AccumulationStrategy, PerToken


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
