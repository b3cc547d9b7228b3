"""Training in half precision, with a real gradient scaler on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from tests.helpers import ragged_sequences, trainer, weights
from tests.lit.fronts import RAGGED, WINDOW, Plain, merged, micro_batches
from trainkit import AccumulationStrategy, PerToken

SEQUENCES = ragged_sequences(38)


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
    made = torch.amp.GradScaler("cpu", **scaler)
    return {"plugins": MixedPrecision("16-mixed", "cpu", scaler=made)}


def half(made: type[Plain] = Plain, **how: Any) -> Plain:
    return made(**how, dtype=torch.float32)


def fit(
    module: Plain,
    precision: str,
    *callbacks: pl.Callback,
    window: int = WINDOW,
    epochs: int = 2,
    **scaler: Any,
) -> pl.Trainer:
    options = {"callbacks": list(callbacks), "max_epochs": epochs}
    fitted = trainer(window, **options, **precise(precision, **scaler))
    sizes = RAGGED if window > 1 else merged(RAGGED)
    fitted.fit(module, micro_batches(SEQUENCES, sizes))
    return fitted


START = weights(half())
"""In float32."""
