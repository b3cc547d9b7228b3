"""What a policy for BatchNorm may do, and when."""

from __future__ import annotations

from typing import Any

from trainkit.core.batch_norm.layers import BatchNorm


class Policy:
    """One way to deal with BatchNorm under accumulation; does nothing by itself.

    Attributes:
        computes_from_micro_batches: whether its layers still normalise by what one
            micro-batch holds.
    """

    computes_from_micro_batches = True

    def convert(self, module: Any, trainer: Any) -> None:
        """Change the module's layers; before the optimizer is made."""

    def start(self, trainer: Any, module: Any, layers: dict[str, BatchNorm]) -> None:
        """The first batch is about to be trained on, with these layers training."""

    def note_modes(self, module: Any) -> None:
        """The module is in the modes in which it trains."""

    def open_window(self, num_micro_batches: int, layers: dict[str, BatchNorm]) -> None:
        """A window of so many micro-batches opens, with these layers training."""

    def before_use(self, trainer: Any, module: Any) -> None:
        """The running statistics are about to be used or kept."""

    def save(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        """A checkpoint is being written."""

    def state_dict(self) -> dict[str, Any]:
        """The policy's state for a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the policy's state from a checkpoint."""

    def end(self) -> None:
        """Training is over: leave the layers as they were, where that is meant."""

    def summary(self, num_layers: int) -> str:
        """What it does, for the table before training; empty for nothing."""
        return ""
