"""Logged means with the strategy's weights, over all batches and ranks."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.core.ranks import Ranks
from trainkit.core.strategies import LossReduction, Weight
from trainkit.core.window import scalar, totals_dtype
from trainkit.errors import TrainkitError

KEY = "trainkit_exact_means"
"""The entry in a checkpoint: for each rank and name, the totals of the training epoch
so far, and the options with which they will be logged."""


class ExactMeans:
    """The running totals of `log_exact`, one for each stage and name."""

    def __init__(self) -> None:
        self._totals: dict[str, dict[str, Tensor]] = {}
        self._options: dict[str, dict[str, Any]] = {}
        self._before_batch: dict[str, Tensor] | None = None
        self._lacks_beginning: set[str] = set()

    def open(self, stage: str) -> None:
        """Begin an epoch."""
        self._totals[stage] = {}
        self._lacks_beginning.discard(stage)

    def resume(self, stage: str, device: torch.device) -> None:
        """Resume an epoch with the loaded totals, or begin an epoch without any."""
        self._totals[stage] = {
            name: sums.to(device, totals_dtype(device))
            for name, sums in self._totals.get(stage, {}).items()
        }

    def begin_batch(self, stage: str) -> None:
        """Leave this batch out of checkpoints, until `end_batch`.

        A run that resumes from such a checkpoint runs the batch again.
        """
        self._before_batch = dict(self._totals.get(stage, {}))

    def begin_again(self, stage: str) -> None:
        """Drop what this batch has added, since it runs again from its beginning."""
        if self._before_batch is not None:
            self._totals[stage] = dict(self._before_batch)

    @property
    def is_in_batch(self) -> bool:
        """Whether a batch is under way."""
        return self._before_batch is not None

    def end_batch(self) -> None:
        """Let the batch count in checkpoints."""
        self._before_batch = None

    def add(
        self,
        stage: str,
        name: str,
        loss: Tensor,
        weight: Weight,
        reduction: LossReduction,
        options: dict[str, Any],
    ) -> None:
        """Add a batch's loss to the mean of this name."""
        if stage not in self._totals:
            raise TrainkitError(
                f"log_exact({name!r}): the means of this epoch ({stage}) have been "
                f"logged already. Call it for each batch, not when the epoch ends."
            )
        weight = scalar(weight, loss.device)
        total = loss
        if reduction == "mean":  # a mean over nothing is NaN
            total = torch.where(weight == 0, 0, loss * weight)
        totals = self._totals[stage]
        sums = torch.stack([total, weight])
        totals[name] = totals[name] + sums if name in totals else sums
        self._options[name] = options

    def log(self, pl_module: Any, stage: str, ranks: Ranks) -> None:
        """Log a stage's means and forget them. Every rank must call this."""
        totals = self._totals.pop(stage, {})
        names = self._names_on_all_ranks(totals, ranks)
        if stage in self._lacks_beginning and names:
            warnings.warn(
                f"log_exact: the checkpoint was taken within an epoch and does not "
                f"hold what all ranks had added up for {', '.join(names)}, so the mean "
                f"covers only the rest of this epoch.",
                stacklevel=2,
            )
        for name in names:
            sums = totals.get(name)
            if sums is None:  # no batch of this rank logged it
                sums = torch.stack([scalar(0, pl_module.device)] * 2)
            total, weight = ranks.sum_(sums)
            pl_module.log(
                name,
                (total / weight).to(torch.get_default_dtype()),
                on_step=False,
                on_epoch=True,
                batch_size=1,
                sync_dist=ranks.size > 1,  # the number is equal on all ranks
                **self._options.get(name, {}),
            )

    def state_dict(self, stage: str) -> dict[str, dict[str, Any]]:
        """This rank's totals of finished batches, on the CPU."""
        totals = self._totals.get(stage, {})
        if self._before_batch is not None:
            totals = self._before_batch
        return {
            name: {"sums": sums.cpu(), "options": self._options[name]}
            for name, sums in totals.items()
        }

    def load_state_dict(
        self, stage: str, state: dict[str, dict[str, Any]], *, is_whole: bool
    ) -> None:
        """Load what `state_dict` has saved; call `resume` next.

        Args:
            stage: the stage of the totals.
            state: the result of `shared_out`.
            is_whole: whether the totals of all ranks are known. If they are not, there
                is a warning when a mean is logged.
        """
        self._totals[stage] = {name: each["sums"] for name, each in state.items()}
        self._options.update({name: each["options"] for name, each in state.items()})
        if not is_whole:
            self._lacks_beginning.add(stage)

    def _names_on_all_ranks(self, totals: dict[str, Tensor], ranks: Ranks) -> list[str]:
        if ranks.size == 1:
            return list(totals)
        found: list[Any] = [None] * ranks.size
        mine = [(name, self._options[name]) for name in totals]
        dist.all_gather_object(found, mine, group=ranks.group)
        everywhere = dict(item for names in found for item in names)
        for name, options in everywhere.items():
            self._options.setdefault(name, options)
        return sorted(everywhere)


def shared_out(
    states: list[dict[str, dict[str, Any]] | None], rank: int, world_size: int
) -> dict[str, dict[str, Any]]:
    """A rank's share of all ranks' `state_dict`.

    Each rank gets its own. If the number of ranks has changed, the first one gets all,
    since only the sum over the ranks counts.
    """
    if len(states) == world_size:
        return states[rank] or {}
    merged: dict[str, dict[str, Any]] = {}
    for name, each in (item for state in states if state for item in state.items()):
        before = merged[name]["sums"] if name in merged else 0
        merged[name] = {**each, "sums": before + each["sums"]}
    return merged if rank == 0 else {}


def one_number(name: str, loss: Tensor | float, device: Any) -> Tensor:
    """The loss as a tensor, refused if it is more than one number."""
    if isinstance(loss, Tensor) and loss.numel() != 1:
        raise TrainkitError(
            f"log_exact({name!r}): the loss must be one number, received a tensor of "
            f"shape {list(loss.shape)}. Reduce it to the mean or sum that the "
            f"strategy's loss_reduction names."
        )
    return scalar(loss, device)


def stage_of(trainer: Any) -> str:
    """The stage whose means `log_exact` adds to now."""
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
