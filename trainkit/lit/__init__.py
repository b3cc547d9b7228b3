"""The Lightning front: what a `Trainer` needs to step with exact gradients."""

from typing import TYPE_CHECKING

from trainkit._lazy import lazy_exports

if TYPE_CHECKING:
    from trainkit.lit.batch_norm.guard import BatchNormGuard
    from trainkit.lit.batch_size.effective import read_effective_batch
    from trainkit.lit.front.accumulation_callback import AccumulationCallback
    from trainkit.lit.front.exact_resume import ExactResume
    from trainkit.lit.front.mixin import AccumulationMixin
    from trainkit.lit.logs.metric_rows import MetricRows
    from trainkit.lit.logs.metrics_csv import MetricsCSVLogger
    from trainkit.lit.logs.monitor import WindowMonitor
    from trainkit.lit.logs.plain_comparison import PlainComparison
    from trainkit.lit.logs.step_progress import StepProgress
    from trainkit.lit.probe.find import FoundMicroBatch, find_micro_batch
    from trainkit.lit.rates.learning_rates import LearningRates
    from trainkit.lit.rates.lr_scaling import LRScaling
    from trainkit.lit.resume.epoch_sums import EpochSums
    from trainkit.lit.resume.graceful_stop import GracefulStop
    from trainkit.lit.resume.random_state import RandomState
    from trainkit.lit.resume.run_checkpoint import RunCheckpoint
    from trainkit.lit.schedule.callback import AccumulationSchedule

__all__ = [
    "AccumulationCallback",
    "AccumulationMixin",
    "AccumulationSchedule",
    "BatchNormGuard",
    "EpochSums",
    "ExactResume",
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
    "find_micro_batch",
    "read_effective_batch",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "AccumulationCallback": ".front.accumulation_callback",
        "AccumulationMixin": ".front.mixin",
        "AccumulationSchedule": ".schedule.callback",
        "BatchNormGuard": ".batch_norm.guard",
        "EpochSums": ".resume.epoch_sums",
        "ExactResume": ".front.exact_resume",
        "FoundMicroBatch": ".probe.find",
        "GracefulStop": ".resume.graceful_stop",
        "LearningRates": ".rates.learning_rates",
        "LRScaling": ".rates.lr_scaling",
        "MetricRows": ".logs.metric_rows",
        "MetricsCSVLogger": ".logs.metrics_csv",
        "PlainComparison": ".logs.plain_comparison",
        "RandomState": ".resume.random_state",
        "RunCheckpoint": ".resume.run_checkpoint",
        "StepProgress": ".logs.step_progress",
        "WindowMonitor": ".logs.monitor",
        "find_micro_batch": ".probe.find",
        "read_effective_batch": ".batch_size.effective",
    },
)
