"""Loading: what reaches a training loop, and how it goes on after an interruption."""

from typing import TYPE_CHECKING

from trainkit._lazy import lazy_exports

if TYPE_CHECKING:
    from trainkit.data.filler import WeighNothing
    from trainkit.data.length_grouped import LengthGroupedSampler
    from trainkit.data.padding import PadCollate
    from trainkit.data.resumable import ResumableLoader
    from trainkit.data.token_budget import TokenBudgetSampler

__all__ = [
    "LengthGroupedSampler",
    "PadCollate",
    "ResumableLoader",
    "TokenBudgetSampler",
    "WeighNothing",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "LengthGroupedSampler": ".length_grouped",
        "PadCollate": ".padding",
        "ResumableLoader": ".resumable",
        "TokenBudgetSampler": ".token_budget",
        "WeighNothing": ".filler",
    },
)
