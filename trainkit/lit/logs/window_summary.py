"""What all windows of a training were, in a few numbers."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor

from trainkit.lit.batch_size.effective import longest_window, windows_of

_FACTS = ("windows", "weight", "smallest", "largest", "first_loss", "last_loss")


class WindowSummary(Callback):
    """Keeps count of windows, on the device; nothing waits for it before it is asked.

    With several optimizers, of the first one's windows.

    Attributes:
        sizes: micro-batches of a full window at the first optimizer step and at the
            last one, which a schedule makes differ; None before the first.
    """

    def __init__(self) -> None:
        super().__init__()
        self._facts: Tensor | None = None
        self._last: Any = None
        self._steps = 0
        self.sizes: tuple[int, int] | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._last = None
        self._steps = trainer.global_step

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._note_size(trainer)
        windows = windows_of(trainer)
        stats = None if windows is None else windows.windows.get(0)
        if stats is None or stats is self._last:
            return
        self._last = stats
        one = torch.ones_like(stats.weight)
        new = [one, stats.weight, stats.weight, stats.weight, stats.loss, stats.loss]
        if self._facts is not None:
            count, weight, smallest, largest, first, _ = self._facts.to(one.device)
            new[:5] = [
                count + 1,
                weight + stats.weight,
                torch.minimum(smallest, stats.weight),
                torch.maximum(largest, stats.weight),
                first,
            ]
        self._facts = torch.stack([each.to(one) for each in new])

    def _note_size(self, trainer: Any) -> None:
        if trainer.global_step != self._steps:
            self._steps = trainer.global_step
            size = longest_window(trainer)
            self.sizes = (size if self.sizes is None else self.sizes[0], size)

    def facts(self) -> dict[str, float]:
        """Windows, their weight in all, the smallest and largest, first and last loss;
        empty before the first window."""
        if self._facts is None:
            return {}
        return dict(zip(_FACTS, self._facts.tolist(), strict=True))

    def state_dict(self) -> dict[str, Any]:
        return {"facts": self._facts, "sizes": self.sizes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._facts = state_dict["facts"]
        sizes = state_dict.get("sizes")
        self.sizes = None if sizes is None else (sizes[0], sizes[1])
