"""The Lightning front: what a `Trainer` needs to step with exact gradients."""

from typing import TYPE_CHECKING

from trainkit._lazy import lazy_exports

if TYPE_CHECKING:
    from trainkit.lit.batch_norm_guard import BatchNormGuard
    from trainkit.lit.callback import AccumulationCallback
    from trainkit.lit.effective import read_effective_batch
    from trainkit.lit.lr_scaling import LRScaling
    from trainkit.lit.mixin import AccumulationMixin
    from trainkit.lit.monitor import WindowMonitor
    from trainkit.lit.schedule import AccumulationSchedule

__all__ = [
    "AccumulationCallback",
    "AccumulationMixin",
    "AccumulationSchedule",
    "BatchNormGuard",
    "LRScaling",
    "WindowMonitor",
    "read_effective_batch",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "AccumulationCallback": ".callback",
        "AccumulationMixin": ".mixin",
        "AccumulationSchedule": ".schedule",
        "BatchNormGuard": ".batch_norm_guard",
        "LRScaling": ".lr_scaling",
        "WindowMonitor": ".monitor",
        "read_effective_batch": ".effective",
    },
)
