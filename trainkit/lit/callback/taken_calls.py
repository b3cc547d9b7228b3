"""Methods of Lightning's strategy object that are replaced while `fit` runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from trainkit.errors import TrainkitError
from trainkit.lit._compat import (
    has_plain_backward,
    is_listened_to,
    replaced,
    scaler_of,
)
from trainkit.lit.callback.base import has_finder


@contextmanager
def taken_calls(trainer: Any, owner: Any, **mine: Callable[..., Any]) -> Iterator[None]:
    """Let Lightning call our methods in place of its strategy object's methods.

    They run right around `training_step`, after all hooks that may edit the batch. No
    callback hook runs there.

    Args:
        trainer: in `fit`.
        owner: the callback that divides windows.
        **mine: the methods, by name.
    """
    strategy, taken = trainer.strategy, _Taken(trainer, owner)
    calls = {
        name: partial(taken.call, own, getattr(strategy, name))
        for name, own in mine.items()
    }
    with replaced(strategy, **calls):
        yield


class _Taken:
    """Calls our method, or Lightning's own while a finder has taken the callback out,
    which was announced before training."""

    def __init__(self, trainer: Any, owner: Any) -> None:
        self._trainer, self._owner = trainer, owner
        self._may_search = has_finder(trainer)

    def call(
        self,
        own: Callable[..., Any],
        plain: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if self._owner in self._trainer.callbacks:
            return own(*args, **kwargs)
        accumulators = self._owner.accumulators.values()
        held = sum(a.num_micro_batches for a in accumulators if a.is_open)
        if held or not self._may_search:
            raise TrainkitError(
                f"trainer.callbacks: {type(self._owner).__name__} was taken out of it, "
                f"inside a window of {held} micro-batches so far. A search by one of "
                f"Lightning's finders may do so between two windows, for example in "
                f"on_train_epoch_start; nothing else may."
            )
        return plain(*args, **kwargs)


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
