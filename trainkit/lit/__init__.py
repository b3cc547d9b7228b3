"""The Lightning front: what a `Trainer` needs to step with exact gradients."""

from typing import TYPE_CHECKING

from trainkit._lazy import lazy_exports

if TYPE_CHECKING:
    from trainkit.lit.callback import AccumulationCallback
    from trainkit.lit.mixin import AccumulationMixin
    from trainkit.lit.monitor import WindowMonitor

__all__ = ["AccumulationCallback", "AccumulationMixin", "WindowMonitor"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "AccumulationCallback": ".callback",
        "AccumulationMixin": ".mixin",
        "WindowMonitor": ".monitor",
    },
)
