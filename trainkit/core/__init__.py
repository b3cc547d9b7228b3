"""The mathematics of a window, for any training loop; needs torch and nothing else."""

from typing import TYPE_CHECKING

from trainkit._lazy import lazy_exports

if TYPE_CHECKING:
    from trainkit.core.accumulator import Accumulator
    from trainkit.core.batch_plan import BatchPlan
    from trainkit.core.curves import warmup_cosine
    from trainkit.core.effective import EffectiveBatch
    from trainkit.core.epoch_plan import EpochPlan
    from trainkit.core.split.micro_batching import MicroBatching
    from trainkit.core.strategies import (
        AccumulationStrategy,
        PerSample,
        PerToken,
        Uniform,
    )
    from trainkit.core.window_stats import WindowStats

__all__ = [
    "AccumulationStrategy",
    "Accumulator",
    "BatchPlan",
    "EffectiveBatch",
    "EpochPlan",
    "MicroBatching",
    "PerSample",
    "PerToken",
    "Uniform",
    "WindowStats",
    "warmup_cosine",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "AccumulationStrategy": ".strategies",
        "Accumulator": ".accumulator",
        "BatchPlan": ".batch_plan",
        "EffectiveBatch": ".effective",
        "EpochPlan": ".epoch_plan",
        "MicroBatching": ".split.micro_batching",
        "PerSample": ".strategies",
        "PerToken": ".strategies",
        "Uniform": ".strategies",
        "WindowStats": ".window_stats",
        "warmup_cosine": ".curves",
    },
)
