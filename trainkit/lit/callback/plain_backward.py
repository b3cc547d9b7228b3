"""Backward passes around which nobody's hook runs."""

from __future__ import annotations

from typing import Any

from trainkit.lit._compat import (
    has_own,
    has_plain_backward,
    is_listened_to,
    scaler_of,
)

_HOOKS = ("on_before_backward", "on_after_backward")


def is_plain(trainer: Any, pl_module: Any, windows: Any) -> bool:
    """Whether Lightning's `backward` is no more than `loss.backward()` for all but the
    callback that divides windows.

    To call hooks that nobody has would cost as much as a small layer.
    """
    return (
        scaler_of(trainer) is None
        and has_plain_backward(trainer)
        and not has_own(pl_module, "backward")
        and not is_listened_to(_HOOKS, trainer, pl_module, apart_from=windows)
    )
