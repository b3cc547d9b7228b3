"""Logged means with the strategy's weights, over all batches and ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.core.ranks import Ranks
from trainkit.core.strategies import LossReduction, Weight
from trainkit.core.window import scalar, totals_dtype
from trainkit.errors import TrainkitError

KEY = "trainkit_exact_means"
"""The entry in a checkpoint: for each rank and name, the sums of the training epoch so
far, and the options with which their mean will be logged."""

Mean = Mapping[str, Any]
"""`sums`: of the losses and of their weights, as one tensor; `options`: of `log`."""


class ExactMeans:
    """The running sums of `log_exact`, one for each stage and name."""

    def __init__(self) -> None:
        self._means: dict[str, dict[str, Mean]] = {}
        self._before_batch: dict[str, Mean] | None = None
        self._lacks_beginning: set[str] = set()

    def open(self, stage: str) -> None:
        """Begin an epoch."""
        self._means[stage] = {}
        self._lacks_beginning.discard(stage)

    def begin_batch(self, stage: str) -> None:
        """Leave this batch out of checkpoints, until `end_batch`.

        A run that resumes from such a checkpoint runs the batch again.
        """
        self._before_batch = dict(self._means.get(stage, {}))

    def begin_again(self, stage: str) -> None:
        """Drop what this batch has added, since it runs again from its beginning."""
        if self._before_batch is not None:
            self._means[stage] = dict(self._before_batch)

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
        if stage not in self._means:
            raise TrainkitError(
                f"log_exact({name!r}): the means of this epoch ({stage}) have been "
                f"logged already. Call it for each batch, not when the epoch ends."
            )
        weight = scalar(weight, loss.device)
        total = loss
        if reduction == "mean":  # a mean over nothing is NaN
            total = torch.where(weight == 0, 0, loss * weight)
        self._add(
            stage, name, {"sums": torch.stack([total, weight]), "options": options}
        )

    def log(self, pl_module: Any, stage: str, ranks: Ranks) -> None:
        """Log a stage's means and forget them. Every rank must call this."""
        found: list[Any] = [self._means.pop(stage, {})]
        if ranks.size > 1:  # a rank may have had no batch that logged a name
            found, mine = [None] * ranks.size, _on_host(found[0])
            dist.all_gather_object(found, mine, group=ranks.group)
        names = dict.fromkeys(name for means in found for name in means)
        if stage in self._lacks_beginning and names:
            warnings.warn(
                f"log_exact: the checkpoint was taken within an epoch and does not "
                f"hold what all ranks had added up for {', '.join(names)}, so the "
                f"mean covers only the rest of this epoch.",
                stacklevel=2,
            )
        for name in names:
            held = [means[name] for means in found if name in means]
            total, weight = torch.stack([mean["sums"] for mean in held]).sum(0)
            pl_module.log(
                name,
                (total / weight).to(pl_module.device, torch.get_default_dtype()),
                on_step=False,
                on_epoch=True,
                batch_size=1,
                sync_dist=ranks.size > 1,  # the number is equal on all ranks
                **held[0]["options"],
            )

    def state_dict(self, stage: str) -> dict[str, Mean]:
        """This rank's sums of finished batches, on the CPU."""
        is_open = self._before_batch is not None
        return _on_host(self._before_batch if is_open else self._means.get(stage, {}))

    def load_state_dict(
        self, stage: str, states: Iterable[Mapping[str, Mean]], *, is_whole: bool
    ) -> None:
        """Continue the epoch of what `state_dict` has saved.

        Args:
            stage: the stage of the sums.
            states: of this rank, and of those that it stands in for.
            is_whole: whether the sums of all ranks are known. If they are not, there
                is a warning when a mean is logged.
        """
        self.open(stage)
        for name, mean in (item for state in states for item in state.items()):
            self._add(stage, name, mean)
        if not is_whole:
            self._lacks_beginning.add(stage)

    def _add(self, stage: str, name: str, mean: Mean) -> None:
        before, sums = self._means[stage].get(name), mean["sums"]
        if before is not None:
            dtype = totals_dtype(sums.device)  # a checkpoint's are on the CPU
            sums = before["sums"].to(sums.device, dtype) + sums
        self._means[stage][name] = {**mean, "sums": sums}


def _on_host(means: Mapping[str, Mean] | None) -> dict[str, Mean]:
    found = (means or {}).items()
    return {name: {**mean, "sums": mean["sums"].cpu()} for name, mean in found}


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
