"""Gradient accumulation that is exactly the big batch, for PyTorch Lightning.

    gradient of a step = sum_i w_i * grad(mean loss of micro-batch i) / sum_i w_i

over all micro-batches of the window, on all ranks. Importing `trainkit` loads neither
torch nor lightning: each name below brings in what it needs when it is first used.
"""

from typing import TYPE_CHECKING

from trainkit._lazy import lazy_exports

if TYPE_CHECKING:
    from trainkit.cli.fit.cli import TrainkitCLI
    from trainkit.cli.wandb_logger.logger import WandbRunLogger
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
    from trainkit.data.filler import WeighNothing
    from trainkit.data.length_grouped import LengthGroupedSampler
    from trainkit.data.padding import PadCollate
    from trainkit.data.resumable import ResumableLoader
    from trainkit.data.token_budget import TokenBudgetSampler
    from trainkit.errors import TrainkitError
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

__version__ = "0.1.0"

__all__ = [
    "AccumulationCallback",
    "AccumulationMixin",
    "AccumulationSchedule",
    "AccumulationStrategy",
    "Accumulator",
    "BatchNormGuard",
    "BatchPlan",
    "EffectiveBatch",
    "EpochPlan",
    "EpochSums",
    "ExactResume",
    "FoundMicroBatch",
    "GracefulStop",
    "LRScaling",
    "LearningRates",
    "LengthGroupedSampler",
    "MetricRows",
    "MetricsCSVLogger",
    "MicroBatching",
    "PadCollate",
    "PerSample",
    "PerToken",
    "PlainComparison",
    "RandomState",
    "ResumableLoader",
    "RunCheckpoint",
    "StepProgress",
    "TokenBudgetSampler",
    "TrainkitCLI",
    "TrainkitError",
    "Uniform",
    "WandbRunLogger",
    "WeighNothing",
    "WindowMonitor",
    "WindowStats",
    "find_micro_batch",
    "read_effective_batch",
    "warmup_cosine",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "AccumulationCallback": ".lit.front.accumulation_callback",
        "AccumulationMixin": ".lit.front.mixin",
        "AccumulationSchedule": ".lit.schedule.callback",
        "AccumulationStrategy": ".core.strategies",
        "Accumulator": ".core.accumulator",
        "BatchNormGuard": ".lit.batch_norm.guard",
        "BatchPlan": ".core.batch_plan",
        "EffectiveBatch": ".core.effective",
        "EpochPlan": ".core.epoch_plan",
        "EpochSums": ".lit.resume.epoch_sums",
        "ExactResume": ".lit.front.exact_resume",
        "FoundMicroBatch": ".lit.probe.find",
        "GracefulStop": ".lit.resume.graceful_stop",
        "LearningRates": ".lit.rates.learning_rates",
        "LRScaling": ".lit.rates.lr_scaling",
        "LengthGroupedSampler": ".data.length_grouped",
        "MetricRows": ".lit.logs.metric_rows",
        "MetricsCSVLogger": ".lit.logs.metrics_csv",
        "MicroBatching": ".core.split.micro_batching",
        "PadCollate": ".data.padding",
        "PerSample": ".core.strategies",
        "PerToken": ".core.strategies",
        "PlainComparison": ".lit.logs.plain_comparison",
        "RandomState": ".lit.resume.random_state",
        "ResumableLoader": ".data.resumable",
        "RunCheckpoint": ".lit.resume.run_checkpoint",
        "StepProgress": ".lit.logs.step_progress",
        "TokenBudgetSampler": ".data.token_budget",
        "TrainkitCLI": ".cli.fit.cli",
        "TrainkitError": ".errors",
        "Uniform": ".core.strategies",
        "WandbRunLogger": ".cli.wandb_logger.logger",
        "WeighNothing": ".data.filler",
        "WindowMonitor": ".lit.logs.monitor",
        "WindowStats": ".core.window_stats",
        "find_micro_batch": ".lit.probe.find",
        "read_effective_batch": ".lit.batch_size.effective",
        "warmup_cosine": ".core.curves",
    },
)
