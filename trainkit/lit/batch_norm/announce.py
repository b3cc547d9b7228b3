"""Warnings about BatchNorm in small micro-batches, with the remedies by name."""

from __future__ import annotations

import warnings
from typing import Any, Literal

from trainkit.core.batch_norm.layers import BatchNorm, listed, num_sharing_ranks
from trainkit.core.plan.options import brief
from trainkit.data.row_sampler import RowSampler
from trainkit.errors import TrainkitError
from trainkit.lit.batch_norm.policy import Policy
from trainkit.lit.batch_size.effective import find_effective_batch

REMEDIES = (
    "For the running statistics: BatchNormGuard('momentum') makes them forget as "
    "slowly as the big batch's, 'recalibrate' computes them from the data before they "
    "are used. For the noise: 'group_norm' replaces the layers, and "
    "Trainer(sync_batchnorm=True) computes statistics over all ranks. For both: "
    "'exact' normalises by the whole window, which must be one loader batch that "
    "MicroBatching cuts; 'freeze' keeps the statistics of a pretrained model. "
    "'ignore' gives no warning."
)


class Announce(Policy):
    """Warns, or refuses, if statistics come from few samples of a large window."""

    def __init__(self, how: Literal["warn", "error"], *, min_samples: int) -> None:
        self._how = how
        self._min_samples = min_samples
        self._outcome = ""

    def start(self, trainer: Any, module: Any, layers: dict[str, BatchNorm]) -> None:
        self._outcome = ""
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
        """Warn or refuse, once, if micro-batches are too small for the layers.

        Args:
            trainer: in `fit`.
            layers: the layers that train.
            samples: the samples of a micro-batch, on one rank.
            num_micro_batches: the micro-batches of a window, on one rank.
        """
        if self._outcome or num_micro_batches <= 1:
            return
        seen = {n: samples * num_sharing_ranks(x) for n, x in layers.items()}
        few = {name: n for name, n in seen.items() if n < self._min_samples}
        if not few:
            return
        each = ", ".join(brief(n) for n in sorted(set(few.values())))
        outcome = {"warn": "warned", "error": "refused"}[self._how]
        self._outcome = f"on {each} samples ({outcome})"
        warn_or_refuse(
            self._how,
            trainer,
            f"BatchNorm: {listed(list(few))} normalise{'s' * (len(few) == 1)} by the "
            f"statistics of {each} samples, those of one micro-batch, and a window has "
            f"{brief(num_micro_batches)} micro-batches (min_samples="
            f"{self._min_samples}). So few samples make the statistics noisy, which "
            f"accumulation cannot mend, and running statistics move "
            f"{brief(num_micro_batches)} times a step. {REMEDIES}",
        )

    def summary(self, num_layers: int) -> str:
        return self._outcome


def warn_or_refuse(how: str, trainer: Any, text: str) -> None:
    if how == "error":
        raise TrainkitError(text)
    if trainer.is_global_zero:
        warnings.warn(text, stacklevel=2)


def check_last_batch(
    how: str, trainer: Any, values: dict[str, float], num_rows: int
) -> None:
    """Warn or refuse if an epoch's last batch gives a layer one value per channel.

    Args:
        how: `"warn"` or `"error"`.
        trainer: in `fit`.
        values: for each layer, how many values per channel one row gives it.
        num_rows: the rows of that batch.
    """
    lonely = [name for name, per_row in values.items() if per_row * num_rows <= 1]
    if lonely:
        warn_or_refuse(
            how,
            trainer,
            f"BatchNorm: the last batch of the epoch has {num_rows} row, which leaves "
            f"{listed(lonely)} with one value per channel. torch cannot normalise one "
            f"value, so the epoch would end in an error. Give the loader "
            f"drop_last=True, or another batch size.",
        )


def rows_of_last_batch(trainer: Any) -> int | None:
    """How many rows the last batch of an epoch has, or None if that is not known.

    Ranks of a `ResumableLoader` may differ by one; the number is the smallest.
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
        return None  # limit_train_batches ends the epoch earlier
    if isinstance(loader.sampler, RowSampler):
        return loader.sampler.least_in_last_batch
    return num_rows - (num_batches - 1) * size
