"""The moments at which a policy for BatchNorm can act."""

from __future__ import annotations

from typing import Any

from trainkit.core.batch_norm.layers import BatchNorm


class Policy:
    """Base of the policies; itself it does nothing."""

    def begin(self, trainer: Any, module: Any) -> None:
        """Prepare for training, before the first batch is loaded."""

    def convert(self, module: Any, trainer: Any) -> None:
        """Change the module's layers, before the optimizer is made."""

    def start(self, trainer: Any, module: Any, layers: dict[str, BatchNorm]) -> None:
        """Prepare for the first batch, in which these layers train."""

    def note_modes(self, module: Any) -> None:
        """Remember the modes (`training`) that all parts of the module have now."""

    def open_window(self, num_micro_batches: int, layers: dict[str, BatchNorm]) -> None:
        """Prepare for a window, in which these layers train."""

    def end_batch(
        self, trainer: Any, layers: dict[str, BatchNorm], batch: Any, num_parts: int
    ) -> None:
        """A loader batch, which was cut into so many micro-batches, has ended."""

    def before_use(self, trainer: Any, module: Any) -> None:
        """Complete the running statistics, which are about to be used or saved."""

    def save(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        """Complete a checkpoint that is being written."""

    def end(self) -> None:
        """Undo, when training is over, what is meant for training only."""

    def summary(self, num_layers: int) -> str:
        """What the policy does, for the table before training; may be empty."""
        return ""
