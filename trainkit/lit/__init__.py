"""The Lightning front: what a `Trainer` needs to step with exact gradients."""

from typing import TYPE_CHECKING

from trainkit._lazy import lazy_exports

if TYPE_CHECKING:
    from trainkit.lit.accumulation_callback import AccumulationCallback
    from trainkit.lit.batch_norm_guard import BatchNormGuard
    from trainkit.lit.effective import read_effective_batch
    from trainkit.lit.epoch_sums import EpochSums
    from trainkit.lit.find_micro_batch import FoundMicroBatch
    from trainkit.lit.graceful_stop import GracefulStop
    from trainkit.lit.learning_rates import LearningRates
    from trainkit.lit.lr_scaling import LRScaling
    from trainkit.lit.metric_rows import MetricRows
    from trainkit.lit.metrics_csv import MetricsCSVLogger
    from trainkit.lit.mixin import AccumulationMixin
    from trainkit.lit.monitor import WindowMonitor
    from trainkit.lit.plain_comparison import PlainComparison
    from trainkit.lit.random_state import RandomState
    from trainkit.lit.run_checkpoint import RunCheckpoint
    from trainkit.lit.schedule import AccumulationSchedule
    from trainkit.lit.step_progress import StepProgress

__all__ = [
    "AccumulationCallback",
    "AccumulationMixin",
    "AccumulationSchedule",
    "BatchNormGuard",
    "EpochSums",
    "FoundMicroBatch",
    "GracefulStop",
    "LRScaling",
    "LearningRates",
    "MetricRows",
    "MetricsCSVLogger",
    "PlainComparison",
    "RandomState",
    "RunCheckpoint",
    "StepProgress",
    "WindowMonitor",
    "read_effective_batch",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "AccumulationCallback": ".accumulation_callback",
        "AccumulationMixin": ".mixin",
        "AccumulationSchedule": ".schedule",
        "BatchNormGuard": ".batch_norm_guard",
        "EpochSums": ".epoch_sums",
        "FoundMicroBatch": ".find_micro_batch",
        "GracefulStop": ".graceful_stop",
        "LearningRates": ".learning_rates",
        "LRScaling": ".lr_scaling",
        "MetricRows": ".metric_rows",
        "MetricsCSVLogger": ".metrics_csv",
        "PlainComparison": ".plain_comparison",
        "RandomState": ".random_state",
        "RunCheckpoint": ".run_checkpoint",
        "StepProgress": ".step_progress",
        "WindowMonitor": ".monitor",
        "read_effective_batch": ".effective",
    },
)
