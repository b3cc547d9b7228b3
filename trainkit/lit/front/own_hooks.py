"""Hooks that a mixin module's instance may have for itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from inspect import getattr_static
from types import MethodType
from typing import Any

from trainkit.errors import TrainkitError
from trainkit.lit.callback.base import no_callbacks
from trainkit.lit.front.mixin_callback import MixinCallback

CALLBACKS = "configure_callbacks"


class OwnCallbacks:
    """A `configure_callbacks` that an instance may replace with its own.

    What the instance's own function returns is extended by the mixin's callback.

    A data descriptor, since the instance's own function would hide anything else. What
    was set stays in the instance as it is, which can be sent and copied as before.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __get__(self, module: Any, kind: Any = None) -> Any:
        if module is None:
            return self.function
        # By super() a base class is asked for its own.
        is_asked_last = getattr_static(type(module), CALLBACKS) is not self
        if is_asked_last or CALLBACKS not in vars(module):
            return MethodType(self.function, module)
        return partial(_extended, module, vars(module)[CALLBACKS])

    def __set__(self, module: Any, function: Any) -> None:
        vars(module)[CALLBACKS] = function

    def __delete__(self, module: Any) -> None:
        if vars(module).pop(CALLBACKS, self) is self:
            raise AttributeError(CALLBACKS)


def listed(callbacks: Any) -> list[Any]:
    """The result of a `configure_callbacks` as a list."""
    if not callbacks:
        return []
    return list(callbacks) if isinstance(callbacks, Sequence) else [callbacks]


def checked(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Let an override of `configure_callbacks` complain if it leaves ours out."""

    @functools.wraps(hook)
    def looked_at(self: Any) -> Any:
        result = hook(self)
        if not any(isinstance(each, MixinCallback) for each in listed(result)):
            name = f"{type(self).__name__}.configure_callbacks()"
            raise TrainkitError(
                f"{name}: it must call super().configure_callbacks(), and return or "
                f"extend what that returns; received {result!r}, without what "
                f"AccumulationMixin brings."
            )
        return result

    return looked_at


def _extended(module: Any, own: Any) -> list[Any]:
    if own is no_callbacks:
        return []
    return module._with_driver(own() if callable(own) else [])
