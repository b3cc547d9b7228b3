"""The closed windows of a training, in a few numbers."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from trainkit.lit.batch_size.effective import longest_window
from trainkit.lit.callback.base import windows_of


class WindowSummary(Callback):
    """The closed windows of the first optimizer, in a few numbers.

    Attributes:
        sizes: micro-batches of a full window at the first optimizer step and at the
            last one, which a schedule makes differ; None before the first.
    """

    def __init__(self) -> None:
        super().__init__()
        self._steps = 0
        self.sizes: tuple[int, int] | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._steps = trainer.global_step

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step != self._steps:
            self._steps = trainer.global_step
            size = longest_window(trainer)
            self.sizes = (size if self.sizes is None else self.sizes[0], size)

    def state_dict(self) -> dict[str, Any]:
        return {"sizes": self.sizes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        sizes = state_dict["sizes"]
        self.sizes = None if sizes is None else (sizes[0], sizes[1])


def facts_of_windows(trainer: Any) -> dict[str, float]:
    """The number of windows, their weights and their losses; empty before the first."""
    windows = windows_of(trainer)
    account = None if windows is None else windows.ledger.of()
    if account is None:
        return {}
    names = "smallest", "largest", "first_loss", "last_loss"
    return {
        "windows": account.num_windows,
        "weight": float(account.weight),
        **dict(zip(names, account.extremes.tolist(), strict=True)),
    }
