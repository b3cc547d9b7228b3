"""The effective batch and learning rates in the configuration of a W&B run."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.loggers import WandbLogger

from trainkit.core.plan.effective_batch import EffectiveBatch, Unit
from trainkit.lit.batch_size.effective import find_effective_batch


class WandbFacts(Callback):
    """Adds the effective batch and the learning rates to every W&B run's configuration.

    So runs can be compared and grouped by them:

    - `effective_batch`: samples and tokens, and their factors. What is not known when
      training starts, such as tokens, is added at its end.
    - `learning_rate`: of each optimizer and parameter group when training starts.
      `LRScaling` adds the rates before and after scaling as `lr_scaling`.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        _log(trainer, {"learning_rate": _learning_rates(trainer)})
        self._log_batch(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._log_batch(trainer)

    def _log_batch(self, trainer: Any) -> None:
        units: tuple[Unit, ...] = ("samples", "tokens")
        found = [find_effective_batch(trainer, unit=unit) for unit in units]
        known = [batch for batch in found if batch is not None]
        if known:
            _log(trainer, {"effective_batch": _entries(known)})


def _entries(known: list[EffectiveBatch]) -> dict[str, Any]:
    entries: dict[str, Any] = {
        "accumulate": known[0].accumulate,
        "replicas": known[0].replicas,
    }
    for batch in known:
        entries[batch.unit] = batch.size
        entries[f"micro_batch_{batch.unit}"] = batch.micro_batch
    return entries


def _learning_rates(trainer: Any) -> dict[str, list[float]]:
    return {
        f"optimizer_{index}": [float(group["lr"]) for group in optimizer.param_groups]
        for index, optimizer in enumerate(trainer.optimizers)
    }


def _log(trainer: Any, facts: dict[str, Any]) -> None:
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            logger.log_hyperparams(facts)
