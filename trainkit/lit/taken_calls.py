"""Lightning's calls of its strategy object, taken while `fit` runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from trainkit.lit._compat import replaced
from trainkit.lit.base import is_taken_out
from trainkit.lit.refusals import refuse_search_inside_window


@contextmanager
def taken_calls(trainer: Any, owner: Any, **mine: Callable[..., Any]) -> Iterator[None]:
    """Let Lightning call methods of ours in place of its strategy object's.

    No hook of a callback stands where these do: right around `training_step`, after all
    hooks that may edit the batch. Lightning's finders take callbacks out while they
    search, within a training too: then its own methods are called.

    Args:
        trainer: in `fit`.
        owner: the callback that divides windows.
        **mine: the methods, by name.
    """
    strategy = trainer.strategy
    calls = {
        name: partial(_call, trainer, owner, own, getattr(strategy, name))
        for name, own in mine.items()
    }
    with replaced(strategy, **calls):
        yield


def _call(
    trainer: Any,
    owner: Any,
    own: Callable[..., Any],
    plain: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not is_taken_out(owner, trainer):
        return own(*args, **kwargs)
    refuse_search_inside_window(owner.accumulators.values())
    return plain(*args, **kwargs)
