"""BatchNorm under accumulation: what no gradient can make up for, and its remedies."""

from typing import TYPE_CHECKING

from trainkit._lazy import lazy_exports

if TYPE_CHECKING:
    from trainkit.core.batch_norm.layers import momentum_per_micro_batch
    from trainkit.core.batch_norm.recalibration import recalibrate
    from trainkit.core.batch_norm.renorm import BatchRenorm
    from trainkit.core.batch_norm.replace import to_group_norm, to_renorm, to_sync

__all__ = [
    "BatchRenorm",
    "momentum_per_micro_batch",
    "recalibrate",
    "to_group_norm",
    "to_renorm",
    "to_sync",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "BatchRenorm": ".renorm",
        "momentum_per_micro_batch": ".layers",
        "recalibrate": ".recalibration",
        "to_group_norm": ".replace",
        "to_renorm": ".replace",
        "to_sync": ".replace",
    },
)
