"""Methods of Lightning's strategy object that are replaced while `fit` runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from trainkit.errors import TrainkitError
from trainkit.lit._compat import replaced
from trainkit.lit.callback.base import WindowOwner, has_finder


@contextmanager
def taken_calls(
    trainer: Any, owner: WindowOwner, mine: dict[str, Callable[..., Any]]
) -> Iterator[None]:
    """Let Lightning call our methods in place of its strategy object's methods.

    They run right around `training_step`, after all hooks that may edit the batch. No
    callback hook runs there. A finder takes all callbacks out while it searches, which
    was announced before training; Lightning's own methods run then.

    Args:
        trainer: in `fit`.
        owner: the callback that divides windows.
        mine: the methods, by name.
    """
    strategy = trainer.strategy
    if has_finder(trainer):
        mine = {
            name: partial(_unless_searching, trainer, owner, own, plain)
            for name, own in mine.items()
            for plain in [getattr(strategy, name)]
        }
    with replaced(strategy, **mine):
        yield


def _unless_searching(
    trainer: Any, owner: WindowOwner, own: Any, plain: Any, *args: Any, **kwargs: Any
) -> Any:
    if owner in trainer.callbacks:
        return own(*args, **kwargs)
    accumulators = owner.accumulators.values()
    if held := sum(a.num_micro_batches for a in accumulators if a.is_open):
        raise TrainkitError(
            f"trainer.callbacks: {type(owner).__name__} was taken out of it, inside a "
            f"window of {held} micro-batches so far. A search by one of Lightning's "
            f"finders may do so between two windows, for example in "
            f"on_train_epoch_start; nothing else may."
        )
    return plain(*args, **kwargs)
