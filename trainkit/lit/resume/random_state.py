"""Random generators that continue where an interrupted run stopped."""

from __future__ import annotations

import warnings
from typing import Any

from lightning.pytorch import Callback

from trainkit.core.generators import read_states, write_states
from trainkit.lit._compat import restore_loaders
from trainkit.lit.resume.rank_states import gather, own

KEY = "trainkit_random"
"""The entry in a checkpoint."""


class RandomState(Callback):
    """Saves the states of all random generators, each rank's own, and restores them.

    These are Python's, NumPy's, torch's and the device's generators. So dropout
    continues exactly in a resumed run, and so do augmentations of a dataset read
    without workers. They are restored when training begins, after all that Lightning
    draws on the way there.

    A `DataLoader` with `shuffle=True` draws its order from torch's generator when an
    epoch begins, so it cannot be resumed within an epoch. A `ResumableLoader` can, and
    draws nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._restored: list[Any] | None = None

    def on_save_checkpoint(
        self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint[KEY] = gather(trainer, read_states(pl_module.device))

    def on_load_checkpoint(
        self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn == "fit":
            self._restored = checkpoint.get(KEY)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        restore_loaders(trainer)
        states, self._restored = self._restored, None
        if states is None:
            return
        state = own(trainer, states)
        if state is not None:
            write_states(state, pl_module.device)
            return
        warnings.warn(
            f"RandomState: the checkpoint holds the random generators of "
            f"{sum(s is not None for s in states)} ranks, but not of rank "
            f"{trainer.global_rank}, which keeps the generators that it has. What it "
            f"draws at random differs from an uninterrupted run.",
            stacklevel=2,
        )
