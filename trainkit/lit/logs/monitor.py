"""The window's true numbers, to whatever logger the Trainer has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel

from trainkit.core.checks import LateReading
from trainkit.core.gradients import parameters_of, total_norm
from trainkit.core.nested import lookup_tensor
from trainkit.core.plan.options import check_whole_number
from trainkit.core.ranks import Ranks
from trainkit.core.strategies import PerSample, PerToken
from trainkit.errors import TrainkitError
from trainkit.lit._compat import (
    add_callback_metrics,
    scaler_of,
    unscales_itself,
    unwrapped,
)
from trainkit.lit.callback.base import find_callback, without_module
from trainkit.lit.logs.rows import LateNumbers
from trainkit.lit.windows.callback import WindowCallback

_OF_EACH = {"loss": "loss", "weight": "weight", "micro_batches": "num_micro_batches"}
"""What callbacks see of each window, also of one that is not logged."""
_OF_LOGGED = _OF_EACH | {name: name for name in ("imbalance", "padding")}


class WindowMonitor(Callback):
    """Logs what the windows were: the first one, and then every nth.

    - `window/loss`: its mean loss over all ranks;
    - `window/weight`: its effective batch, in the strategy's unit;
    - `window/micro_batches`: how many made it;
    - `window/micro_batch_size`: what each was limited to, where that is found while the
      training runs, in tokens, or in rows where batches have no lengths;
    - `window/imbalance`: the largest share of a micro-batch times their number;
    - `window/padding`: the share of tokens that only pad, by the batch's
      `attention_mask`, or else by what the strategy's labels or mask leave out, a
      masked prompt included; in split windows after the cut, by the lengths that it
      goes by;
    - `window/grad_norm`: the exact gradient's 2-norm, before clipping;
    - `window/seen`: the weights of all windows so far, in the strategy's unit;
    - `window/samples_seen`: the samples of all windows so far, where every batch tells
      how many it has.

    The last two count every window, also windows that are not logged, and a resumed run
    continues them: they are x-axes that a change of the batch does not bend.

    They are in `trainer.callback_metrics` too, where EarlyStopping, ModelCheckpoint and
    schedulers find them. `window/loss`, `window/weight` and `window/micro_batches` are
    there those of the last window that has closed, all others those of the last that
    was logged.

    With several optimizers the keys are `window/0/loss` and so on.

    Args:
        every_n_steps: how often; by n = 10 the windows 1, 10, 20, 30.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        super().__init__()
        check_whole_number(
            "WindowMonitor every_n_steps", every_n_steps, hint="1 logs every window."
        )
        self.every_n_steps = every_n_steps
        self._begin(None)

    def _begin(self, windows: Any) -> None:
        self._windows = windows
        self._rows = LateNumbers(_OF_EACH)

    def __getstate__(self) -> dict[str, Any]:
        none = {"_windows": None, "_rows": LateNumbers(_OF_EACH)}
        return {**without_module(self), **none}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._begin(find_callback(trainer, WindowCallback))
        if self._windows is None:
            raise TrainkitError(
                "WindowMonitor: it shows the windows of AccumulationCallback or "
                "AccumulationMixin, and neither is there. Add "
                "AccumulationCallback(PerToken()), say, to the Trainer's callbacks."
            )
        self._windows.counts_samples = True

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._windows.is_split:
            return  # its driver counts what pads
        found = self._what_counts(batch)
        if found is None:
            return
        padding = found.numel() - torch.count_nonzero(found)
        for accumulator in self._windows.accumulators.values():
            accumulator.window.count(padding=padding, tokens=found.numel())

    def on_before_optimizer_step(
        self, trainer: Any, pl_module: Any, optimizer: Any
    ) -> None:
        index = self._windows.index_of(trainer, optimizer)
        accumulator = self._windows.accumulators[index]
        stats = self._windows.windows.get(index)
        if stats is None:  # nothing was divided yet
            return
        several = len(self._windows.accumulators) > 1
        prefix = f"window/{index}/" if several else "window/"
        newest = {prefix + name: getattr(stats, of) for name, of in _OF_EACH.items()}
        add_callback_metrics(trainer, newest)
        if self._is_due(accumulator.num_windows - 1):
            account = self._windows.ledger.of(index)
            size = self._windows.micro_batch_size
            numbers = {
                **{name: getattr(stats, of) for name, of in _OF_LOGGED.items()},
                "seen": None if account is None else account.weight,
                "samples_seen": None if account is None else account.samples,
                "micro_batch_size": None if size is None else torch.tensor(size),
                "grad_norm": _grad_norm(trainer, optimizer, accumulator.ranks),
            }
            known = {prefix + k: n for k, n in numbers.items() if n is not None}
            table = torch.stack([n.to(stats.weight) for n in known.values()])
            self._rows.add_row(
                trainer,
                LateReading(table),
                lambda values: dict(zip(known, values, strict=True)),
            )

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self._rows.serve()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._rows.serve(wait=True)

    def on_save_checkpoint(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self._rows.serve(wait=True)  # a resumed run has none of these rows

    def _is_due(self, window: int) -> bool:
        """Whether a window, counted from 0, is logged."""
        return window == 0 or (window + 1) % self.every_n_steps == 0

    def _what_counts(self, batch: Any) -> Tensor | None:
        """Which of a micro-batch's tokens are no padding; None if nothing tells it."""
        path, strategy = None, self._windows.strategy
        if isinstance(batch, Mapping) and "attention_mask" in batch:
            path = "attention_mask"
        elif isinstance(strategy, PerToken | PerSample):
            path = strategy.mask
        if path is not None:
            return lookup_tensor(batch, path, role="mask") != 0
        if isinstance(strategy, PerToken):
            labels = lookup_tensor(batch, strategy.labels, role="labels")
            return labels.long() != strategy.ignore_index
        return None


def _grad_norm(trainer: Any, optimizer: Any, ranks: Ranks) -> Tensor | None:
    modules = trainer.lightning_module.modules()
    is_flat = any(isinstance(m, FullyShardedDataParallel) for m in modules)
    norm = total_norm(parameters_of(optimizer), ranks if is_flat else None)
    scaler = scaler_of(trainer)
    if norm is None or scaler is None or not unscales_itself(unwrapped(optimizer)):
        return norm
    return norm / scaler.scale(torch.ones_like(norm))
