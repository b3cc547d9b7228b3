"""Warnings about BatchNorm in small micro-batches, with the remedies by name."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any, Literal

from torch import Tensor

from trainkit.core.batch_norm.layers import BatchNorm, listed, num_sharing_ranks
from trainkit.core.plan.options import brief
from trainkit.errors import TrainkitError
from trainkit.lit.batch_norm.policy import Policy
from trainkit.lit.batch_size.effective import (
    find_effective_batch,
    longest_window,
    micro_batch_of,
)

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
    """Warns, or refuses, if statistics come from few samples of a large window.

    What the loader says is judged before the first step, and what layers have really
    seen after the first batch: the loader may say nothing, and batches may be cut.
    """

    def __init__(self, how: Literal["warn", "error"], *, min_samples: int) -> None:
        self._how = how
        self._min_samples = min_samples
        self._outcome = ""
        self._watch: RowWatch | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_watch": None}

    def start(self, trainer: Any, module: Any, layers: dict[str, BatchNorm]) -> None:
        self._outcome = ""
        batch = find_effective_batch(trainer, unit="samples")
        if batch is not None and batch.is_exact:
            self._judge(trainer, layers, batch.micro_batch, batch.accumulate)
        self._watch = RowWatch(layers)

    def end_batch(
        self, trainer: Any, layers: dict[str, BatchNorm], num_parts: int
    ) -> None:
        watch = self._watch
        if watch is None or not watch.rows:
            return
        self.end()
        parts = max(watch.num_parts(micro_batch_of(trainer.train_dataloader)), 1)
        number = longest_window(trainer) * max(parts, num_parts)
        self._judge(trainer, layers, min(watch.rows.values()), number)

    def end(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def _judge(
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
        text = (
            f"BatchNorm: {listed(list(few))} normalise{'s' * (len(few) == 1)} by the "
            f"statistics of {each} samples, those of one micro-batch, and a window has "
            f"{brief(num_micro_batches)} micro-batches (min_samples="
            f"{self._min_samples}). So few samples make the statistics noisy, which "
            f"accumulation cannot mend, and running statistics move "
            f"{brief(num_micro_batches)} times a step. {REMEDIES}"
        )
        if self._how == "error":
            raise TrainkitError(text)
        if trainer.is_global_zero:
            warnings.warn(text, stacklevel=2)

    def summary(self, num_layers: int) -> str:
        return self._outcome


class RowWatch:
    """Records how many rows layers get, until it is closed.

    Attributes:
        rows: for each layer, the fewest rows of one call.
    """

    def __init__(self, layers: dict[str, BatchNorm]) -> None:
        self.rows: dict[str, int] = {}
        self._totals, self._calls = Counter[str](), Counter[str]()
        self._handles = [
            layer.register_forward_pre_hook(self._hook(name), with_kwargs=True)
            for name, layer in layers.items()
        ]

    def num_parts(self, num_rows: int | None) -> int:
        """Into how many parts a batch of so many rows was cut before a layer.

        A split window may cut it, or the module itself. A layer whose calls add up to
        all rows has seen one part with each call.
        """
        cut = [self._calls[n] for n, t in self._totals.items() if t == num_rows]
        return max(cut, default=1)

    def close(self) -> None:
        """Remove its hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _hook(self, name: str) -> Any:
        def record(layer: Any, args: Any, kwargs: Any) -> None:
            x = args[0] if args else kwargs.get("input")
            if layer.training and isinstance(x, Tensor) and x.ndim >= 2:
                rows = x.shape[0]
                self._totals[name] += rows
                self._calls[name] += 1
                self.rows[name] = min(rows, self.rows.get(name, rows))

        return record
