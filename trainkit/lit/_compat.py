"""Everything of Lightning and torch that is not in their public documentation.

Each function has a test of its own, so that a new version which moves one of these
fails there, by name.
"""

from __future__ import annotations

from typing import Any


def scaler_of(trainer: Any) -> Any:
    """The gradient scaler of the Trainer's precision plugin, or None."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None


def unscales_itself(optimizer: Any) -> bool:
    """Whether a scaler leaves the gradients scaled until inside `optimizer.step()`,
    as it does for fused optimizers."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def unwrapped(optimizer: Any) -> Any:
    """The torch optimizer inside a `LightningOptimizer`."""
    return getattr(optimizer, "_optimizer", optimizer)


def averages_models(strategy: Any) -> bool:
    """Whether DDP ranks average weights now and then in place of gradients."""
    return getattr(strategy, "_model_averaging_period", None) is not None
