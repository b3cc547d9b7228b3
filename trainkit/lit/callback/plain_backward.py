"""Backward passes around which nobody's hook runs."""

from __future__ import annotations

from typing import Any

from trainkit.lit._compat import has_plain_backward, is_listened_to, scaler_of

_HOOKS = ("on_before_backward", "on_after_backward", "backward")


class PlainBackward:
    """Knows whether Lightning's `backward` is no more than `loss.backward()` for all
    but the callback that divides windows.

    To call hooks that nobody has would cost as much as a small layer.

    Args:
        trainer: in `fit`.
        pl_module: what trains.
        windows: the callback that divides windows.
    """

    def __init__(self, trainer: Any, pl_module: Any, windows: Any) -> None:
        self._may_be = scaler_of(trainer) is None and has_plain_backward(trainer)
        self._of, self._windows = (trainer, pl_module), windows

    def is_there(self) -> bool:
        """Whether nobody has a hook by now; to be asked when a window begins, since
        some come while training runs."""
        listened = is_listened_to(_HOOKS, *self._of, apart_from=self._windows)
        return self._may_be and not listened
