"""Gradient accumulation that is exactly the big batch, for PyTorch Lightning.

    gradient of a step = sum_i w_i * grad(mean loss of micro-batch i) / sum_i w_i

over all micro-batches of the window, on all ranks. Importing `trainkit` loads neither
torch nor lightning: each name below brings in what it needs when it is first used.
"""

from typing import TYPE_CHECKING

from trainkit._lazy import lazy_exports

if TYPE_CHECKING:
    from trainkit.core.accumulator import Accumulator
    from trainkit.core.effective import EffectiveBatch
    from trainkit.core.strategies import (
        AccumulationStrategy,
        PerSample,
        PerToken,
        Uniform,
    )
    from trainkit.core.window import WindowStats
    from trainkit.errors import TrainkitError
    from trainkit.lit.batch_norm_guard import BatchNormGuard
    from trainkit.lit.callback import AccumulationCallback
    from trainkit.lit.effective import read_effective_batch
    from trainkit.lit.lr_scaling import LRScaling
    from trainkit.lit.mixin import AccumulationMixin
    from trainkit.lit.monitor import WindowMonitor
    from trainkit.lit.schedule import AccumulationSchedule

__version__ = "0.1.0"

__all__ = [
    "AccumulationCallback",
    "AccumulationMixin",
    "AccumulationSchedule",
    "AccumulationStrategy",
    "Accumulator",
    "BatchNormGuard",
    "EffectiveBatch",
    "LRScaling",
    "PerSample",
    "PerToken",
    "TrainkitError",
    "Uniform",
    "WindowMonitor",
    "WindowStats",
    "read_effective_batch",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "AccumulationCallback": ".lit.callback",
        "AccumulationMixin": ".lit.mixin",
        "AccumulationSchedule": ".lit.schedule",
        "AccumulationStrategy": ".core.strategies",
        "Accumulator": ".core.accumulator",
        "BatchNormGuard": ".lit.batch_norm_guard",
        "EffectiveBatch": ".core.effective",
        "LRScaling": ".lit.lr_scaling",
        "PerSample": ".core.strategies",
        "PerToken": ".core.strategies",
        "TrainkitError": ".errors",
        "Uniform": ".core.strategies",
        "WindowMonitor": ".lit.monitor",
        "WindowStats": ".core.window",
        "read_effective_batch": ".lit.effective",
    },
)
