"""Replacement of methods of Lightning's strategy object while `fit` runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from trainkit.core.accumulator import Accumulator
from trainkit.errors import TrainkitError
from trainkit.lit._compat import replaced
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
    """Calls our method, or Lightning's own while the callback is taken out.

    Lightning's finders take callbacks out while they search, also during a training.
    """

    def __init__(self, trainer: Any, owner: Any) -> None:
        self._trainer = trainer
        self._owner = owner
        # A finder that is among the callbacks was announced before training.
        self._has_said = has_finder(trainer)

    def call(
        self,
        own: Callable[..., Any],
        plain: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if self._owner in self._trainer.callbacks:
            return own(*args, **kwargs)
        _refuse_search_inside_window(self._owner.accumulators.values())
        if not self._has_said:
            self._has_said = True
            _announce_taken_out(self._owner)
        return plain(*args, **kwargs)


def _refuse_search_inside_window(accumulators: Iterable[Accumulator]) -> None:
    """Refuse a finder that takes the callback out while a window is open."""
    held = sum(a.num_micro_batches for a in accumulators if a.is_open)
    if held:
        raise TrainkitError(
            f"trainer.callbacks: a search (as by Lightning's finders) has taken out "
            f"the callback that divides windows, inside a window of {held} "
            f"micro-batches so far. The search would zero their gradients. Begin it "
            f"between two windows, for example in on_train_epoch_start."
        )


def _announce_taken_out(callback: Any) -> None:
    warnings.warn(
        f"{type(callback).__name__}: it is not among trainer.callbacks any more. Until "
        f"it is there again, batches run uncut and undivided, with plain Lightning's "
        f"gradients. This warning appears once.",
        stacklevel=2,
    )
