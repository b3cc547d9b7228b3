"""Logged means with the strategy's weights, over all batches and ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.core.ranks import Ranks
from trainkit.core.strategies import LossReduction, Weight
from trainkit.core.window import scalar
from trainkit.errors import TrainkitError


class ExactMeans:
    """The running totals of `log_exact`, one for each stage and name."""

    def __init__(self) -> None:
        self._totals: dict[str, dict[str, Tensor]] = {}
        self._options: dict[str, dict[str, Any]] = {}

    def open(self, stage: str) -> None:
        """An epoch begins."""
        self._totals[stage] = {}

    def add(
        self,
        stage: str,
        name: str,
        loss: Tensor,
        weight: Weight,
        reduction: LossReduction,
        options: dict[str, Any],
    ) -> None:
        if stage not in self._totals:
            raise TrainkitError(
                f"log_exact({name!r}): the means of this epoch ({stage}) have been "
                f"logged already. Call it for each batch, not when the epoch ends."
            )
        weight = scalar(weight, loss.device)
        total = loss * weight if reduction == "mean" else loss
        if reduction == "mean":
            total = torch.where(weight == 0, 0, total)  # a mean over nothing is NaN
        totals = self._totals[stage]
        sums = torch.stack([total, weight])
        totals[name] = totals[name] + sums if name in totals else sums
        self._options[name] = options

    def log(self, pl_module: Any, stage: str, ranks: Ranks) -> None:
        """Log a stage's means and forget them; every rank must come here."""
        totals = self._totals.pop(stage, {})
        for name in self._names(totals, ranks):
            sums = totals.get(name)
            if sums is None:  # this rank had no batch for it
                sums = torch.stack([scalar(0, pl_module.device)] * 2)
            total, weight = ranks.sum_(sums)
            pl_module.log(
                name,
                (total / weight).to(torch.get_default_dtype()),
                on_step=False,
                on_epoch=True,
                batch_size=1,
                sync_dist=ranks.size > 1,  # the same number on all ranks already
                **self._options.get(name, {}),
            )

    def _names(self, totals: dict[str, Tensor], ranks: Ranks) -> list[str]:
        if ranks.size == 1:
            return list(totals)
        found: list[Any] = [None] * ranks.size
        mine = [(name, self._options[name]) for name in totals]
        dist.all_gather_object(found, mine, group=ranks.group)
        everywhere = dict(item for names in found for item in names)
        for name, options in everywhere.items():
            self._options.setdefault(name, options)
        return sorted(everywhere)


def one_number(name: str, loss: Tensor | float, device: Any) -> Tensor:
    if isinstance(loss, Tensor) and loss.numel() != 1:
        raise TrainkitError(
            f"log_exact({name!r}): the loss must be one number, received a tensor of "
            f"shape {list(loss.shape)}. Reduce it to what the strategy says."
        )
    return scalar(loss, device)


def stage_of(trainer: Any) -> str:
    stages = {
        "train": trainer.training,
        "validate": trainer.validating or trainer.sanity_checking,
        "test": trainer.testing,
    }
    for stage, is_active in stages.items():
        if is_active:
            return stage
    raise TrainkitError(
        f"log_exact(): it logs the mean of an epoch of training, validation or test, "
        f"and the Trainer is in {trainer.state.stage}. Call it in training_step, "
        f"validation_step or test_step."
    )
