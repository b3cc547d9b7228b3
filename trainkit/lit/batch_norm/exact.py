"""The policy by which BatchNorm sees whole windows."""

from __future__ import annotations

from typing import Any

from trainkit.core.batch_norm.layers import BatchNorm, layers_to_train
from trainkit.core.joins.engine import Memory, check_memory
from trainkit.errors import TrainkitError
from trainkit.lit._compat import skips_backward
from trainkit.lit.batch_norm.policy import Policy
from trainkit.lit.batch_size.effective import (
    num_replicas,
    scheduled_sizes,
    window_size,
)
from trainkit.lit.callback.base import WindowOwner, windows_of


class ExactStatistics(Policy):
    """Normalises by the statistics of the whole window, on all ranks.

    Args:
        memory: `"auto"`, `"device"` or `"flat"`.

    Attributes:
        memory: the same.
    """

    computes_from_micro_batches = False

    def __init__(self, memory: Memory) -> None:
        check_memory(memory)
        self.memory: Memory = memory
        self._trainer: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_trainer": None}

    def begin(self, trainer: Any, module: Any) -> None:
        self._trainer = trainer
        windows = windows_of(trainer)
        if not layers_to_train(module):
            return
        self._refuse_several(windows)
        self._refuse_schedules()
        if windows is not None:
            windows.join_statistics(trainer, module, self.memory)
        elif num_replicas(trainer) > 1:
            raise TrainkitError(
                "BatchNormGuard('exact'): on several ranks it needs the callback that "
                "sums gradients exactly. Add AccumulationCallback(...), or use "
                "Trainer(sync_batchnorm=True) where a window is one batch."
            )

    def open_window(self, num_micro_batches: int, layers: dict[str, BatchNorm]) -> None:
        trainer = self._trainer
        # Without backward passes, each loader batch is complete by itself.
        if trainer is not None and layers and not skips_backward(trainer):
            self._refuse_several(windows_of(trainer))

    def _refuse_several(self, windows: WindowOwner | None) -> None:
        """Refuse windows of which only a part is at hand at a time."""
        trainer, size = self._trainer, window_size(self._trainer)
        is_manual = not trainer.lightning_module.automatic_optimization
        has_inside = windows is not None and windows.inside is not None
        if size > 1 or is_manual and not has_inside:
            how = "manual optimization" if is_manual else f"{size} loader batches"
            raise _refusal(
                f"here it is made by {how}. Let the loader yield the whole window, set "
                f"accumulate_grad_batches=1, and cut it"
            )

    def _refuse_schedules(self) -> None:
        """Refuse a callback that will make such windows, before training begins."""
        for name, size in scheduled_sizes(self._trainer).items():
            raise _refusal(
                f"{name} will make windows of {size} loader batches. Let the loader "
                f"yield the whole window, leave {name} out, and cut each batch"
            )

    def end(self) -> None:
        self._trainer = None

    def summary(self, num_layers: int) -> str:
        return f"normalised by the whole window, on all ranks (memory={self.memory!r})"


def _refusal(why: str) -> TrainkitError:
    return TrainkitError(
        f"BatchNormGuard('exact'): a window must be one loader batch, so that all of "
        f"it is at hand before the first backward pass, and {why}: "
        f"MicroBatching(inside='net', size=4), or MicroBatching(size=4)."
    )
