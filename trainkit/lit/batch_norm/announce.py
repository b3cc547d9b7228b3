"""Warnings of what accumulation does to BatchNorm, with the remedies by name."""

from __future__ import annotations

import warnings
from typing import Any, Literal

from trainkit.core.batch_norm.layers import BatchNorm, listed, num_sharing_ranks
from trainkit.core.effective import brief
from trainkit.data.row_sampler import RowSampler
from trainkit.errors import TrainkitError
from trainkit.lit.batch_norm.policy import Policy
from trainkit.lit.batch_size.effective import find_effective_batch

REMEDIES = (
    "For the running statistics: BatchNormGuard('momentum') makes them forget as "
    "slowly as the big batch's, 'recalibrate' computes them from the data before they "
    "are used. For the noise: 'group_norm' and 'renorm' put other layers in their "
    "place, 'sync' joins ranks where there are several. For both: 'freeze' keeps the "
    "statistics of a pretrained model. 'ignore' is silent."
)


class Announce(Policy):
    """Warns or refuses where statistics come from few samples of a large window."""

    def __init__(self, how: Literal["warn", "error"], *, min_samples: int) -> None:
        self._how = how
        self._min_samples = min_samples
        self._said = ""

    def start(self, trainer: Any, module: Any, layers: dict[str, BatchNorm]) -> None:
        self._said = ""
        batch = find_effective_batch(trainer, unit="samples")
        if batch is not None and batch.is_exact:
            self.judge(trainer, layers, batch.micro_batch, batch.accumulate)

    def judge(
        self,
        trainer: Any,
        layers: dict[str, BatchNorm],
        samples: float,
        num_micro_batches: int,
    ) -> None:
        """Say so, once, if a window's micro-batches are too small for its layers.

        Args:
            trainer: whose ranks may share statistics.
            layers: that train.
            samples: in a micro-batch, on one rank.
            num_micro_batches: in a window, on one rank.
        """
        if self._said or num_micro_batches <= 1:
            return
        few = {
            name: samples * num_sharing_ranks(layer)
            for name, layer in layers.items()
            if samples * num_sharing_ranks(layer) < self._min_samples
        }
        if not few:
            return
        each = ", ".join(brief(n) for n in sorted(set(few.values())))
        self._said = f"on {each} samples ({_PAST[self._how]})"
        say(
            self._how,
            trainer,
            f"BatchNorm: {listed(list(few))} normalise{'s' * (len(few) == 1)} by the "
            f"statistics of {each} "
            f"samples, those of one micro-batch, and a window has "
            f"{brief(num_micro_batches)} micro-batches (min_samples="
            f"{self._min_samples}). That is the noise of so few, which no accumulation "
            f"can mend, and running statistics that move {brief(num_micro_batches)} "
            f"times a step. {REMEDIES}",
        )

    def summary(self, num_layers: int) -> str:
        return self._said


_PAST = {"warn": "warned", "error": "refused"}


def say(how: str, trainer: Any, text: str) -> None:
    if how == "error":
        raise TrainkitError(text)
    if trainer.is_global_zero:
        warnings.warn(text, stacklevel=2)


def look_at_last_batch(
    how: str, trainer: Any, values: dict[str, float], num_rows: int
) -> None:
    """Warn of a last batch that leaves a layer with one value per channel: torch raises
    there, at the end of the epoch.

    Args:
        how: `"warn"` or `"error"`.
        trainer: whose loader.
        values: for each layer, how many values per channel one row gives it.
        num_rows: in the last batch of an epoch.
    """
    lonely = [name for name, per_row in values.items() if per_row * num_rows <= 1]
    if lonely:
        say(
            how,
            trainer,
            f"BatchNorm: the last batch of the epoch has {num_rows} row, which leaves "
            f"{listed(lonely)} with one value per channel; torch refuses to normalise "
            f"that, at the end of the epoch. Give the loader drop_last=True, or "
            f"another batch size.",
        )


def rows_of_last_batch(trainer: Any) -> int | None:
    """How many rows the last batch of an epoch has, where that is known.

    Ranks of a `ResumableLoader` may differ by one: it is the least on any of them.
    """
    loader = trainer.train_dataloader
    size = getattr(loader, "batch_size", None)
    try:
        num_rows, num_batches = len(loader.sampler), len(loader)
    except (AttributeError, TypeError):
        return None
    if not isinstance(size, int) or getattr(loader, "drop_last", False):
        return None
    if trainer.num_training_batches < num_batches:
        return None  # limit_train_batches ends the epoch before it
    if isinstance(loader.sampler, RowSampler):
        return loader.sampler.least_in_last_batch
    return num_rows - (num_batches - 1) * size
