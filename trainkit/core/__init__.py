"""The mathematics of a window, for any training loop; needs torch and nothing else."""

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

__all__ = [
    "AccumulationStrategy",
    "Accumulator",
    "EffectiveBatch",
    "PerSample",
    "PerToken",
    "Uniform",
    "WindowStats",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "AccumulationStrategy": ".strategies",
        "Accumulator": ".accumulator",
        "EffectiveBatch": ".effective",
        "PerSample": ".strategies",
        "PerToken": ".strategies",
        "Uniform": ".strategies",
        "WindowStats": ".window",
    },
)
