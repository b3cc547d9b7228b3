"""The same training with the cut and without it, on one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor
from torch.utils.data import DataLoader

from tests.helpers import pad, ragged_sequences, trainer, weights
from tests.lit.fronts import Mixed, Plain, plain_token_loss
from tests.lit.fronts import cut as parted
from trainkit import AccumulationStrategy, PerToken
from trainkit.core.split.micro_batching import MicroBatching

SIZES = (14, 17, 9)
"""Samples in each loader batch; the last is short."""

SEQUENCES = ragged_sequences(sum(SIZES))
START = weights(Plain())

CUTS = {
    "size": MicroBatching(size=4),
    "tokens": MicroBatching(tokens=48),
    "size and tokens": MicroBatching(size=5, tokens=40),
    "rows": MicroBatching(size=1),
    "auto": MicroBatching("auto"),
}
FIXED = MicroBatching(size=4)


class Split(Mixed):
    """Cuts its loader batches, and is exact."""

    def __init__(
        self,
        loss: Callable[..., Tensor] = plain_token_loss,
        *,
        strategy: AccumulationStrategy | Mapping[str, Any] | None = None,
        cut: MicroBatching | None = FIXED,
        **how: Any,
    ) -> None:
        super().__init__(loss, **how)
        self.accumulation = PerToken() if strategy is None else strategy
        self.micro_batching = cut


def fit(
    module: Plain,
    *callbacks: pl.Callback,
    window: int = 1,
    sizes: Sequence[int] = SIZES,
    **options: Any,
) -> pl.Trainer:
    """Train on loader batches of these sizes."""
    fitted = trainer(window, callbacks=list(callbacks), **options)
    fitted.fit(module, loader_batches(sizes))
    return fitted


def loader_batches(sizes: Sequence[int] = SIZES) -> DataLoader[Any]:
    return DataLoader(
        SEQUENCES,  # type: ignore[arg-type]
        batch_sampler=parted(SEQUENCES, sizes),
        collate_fn=pad_and_mask,
    )


def pad_and_mask(samples: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    batch = pad(samples)
    return {**batch, "attention_mask": (batch["labels"] != -100).long()}


class Table(Logger):
    """Keeps all rows that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    @property
    def name(self) -> str:
        return "table"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(
        self, metrics: Mapping[str, float], step: int | None = None
    ) -> None:
        self.rows.append({**metrics, "step": -1 if step is None else step})


def logged(
    module: Plain, *callbacks: pl.Callback, **options: Any
) -> tuple[list[dict[str, float]], dict[str, float]]:
    """The logger's rows, and `callback_metrics` at the end."""
    table = Table()
    fitted = fit(
        module, *callbacks, **{"logger": table, "log_every_n_steps": 1} | options
    )
    return table.rows, {k: float(v) for k, v in fitted.callback_metrics.items()}


def assert_same_logs(cut: Any, whole: Any, *, rel: float = 1e-6) -> None:
    """Same rows with the same keys, same metrics."""
    assert [set(row) for row in cut[0]] == [set(row) for row in whole[0]]
    for mine, theirs in zip(cut[0], whole[0], strict=True):
        assert mine == theirs_within(theirs, rel)
    assert cut[1] == theirs_within(whole[1], rel)


def theirs_within(numbers: Mapping[str, float], rel: float) -> Any:
    return pytest.approx(dict(numbers), rel=rel, nan_ok=True)


def moved(module: torch.nn.Module) -> float:
    """How far the weights are from where they started."""
    return float((weights(module) - START).norm())
