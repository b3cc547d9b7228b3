"""Gradient accumulation that is exactly the big batch, for PyTorch Lightning.

    gradient of a step = sum_i w_i * grad(mean loss of micro-batch i) / sum_i w_i

over all micro-batches of the window, on all ranks. Importing `trainkit` loads neither
torch nor lightning: each name below brings in what it needs when it is first used.
"""

from typing import TYPE_CHECKING

from trainkit._lazy import lazy_exports

if TYPE_CHECKING:
    from trainkit.cli.lightning_cli import TrainkitCLI
    from trainkit.cli.wandb_logger import WandbRunLogger
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
    from trainkit.core.window import WindowStats
    from trainkit.data.filler import WeighNothing
    from trainkit.data.length_grouped import LengthGroupedSampler
    from trainkit.data.padding import PadCollate
    from trainkit.data.resumable import ResumableLoader
    from trainkit.data.token_budget import TokenBudgetSampler
    from trainkit.errors import TrainkitError
    from trainkit.lit.accumulation_callback import AccumulationCallback
    from trainkit.lit.batch_norm_guard import BatchNormGuard
    from trainkit.lit.effective import read_effective_batch
    from trainkit.lit.epoch_sums import EpochSums
    from trainkit.lit.find_micro_batch import FoundMicroBatch, find_micro_batch
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
        "AccumulationCallback": ".lit.accumulation_callback",
        "AccumulationMixin": ".lit.mixin",
        "AccumulationSchedule": ".lit.schedule",
        "AccumulationStrategy": ".core.strategies",
        "Accumulator": ".core.accumulator",
        "BatchNormGuard": ".lit.batch_norm_guard",
        "BatchPlan": ".core.batch_plan",
        "EffectiveBatch": ".core.effective",
        "EpochPlan": ".core.epoch_plan",
        "EpochSums": ".lit.epoch_sums",
        "FoundMicroBatch": ".lit.find_micro_batch",
        "GracefulStop": ".lit.graceful_stop",
        "LearningRates": ".lit.learning_rates",
        "LRScaling": ".lit.lr_scaling",
        "LengthGroupedSampler": ".data.length_grouped",
        "MetricRows": ".lit.metric_rows",
        "MetricsCSVLogger": ".lit.metrics_csv",
        "MicroBatching": ".core.split.micro_batching",
        "PadCollate": ".data.padding",
        "PerSample": ".core.strategies",
        "PerToken": ".core.strategies",
        "PlainComparison": ".lit.plain_comparison",
        "RandomState": ".lit.random_state",
        "ResumableLoader": ".data.resumable",
        "RunCheckpoint": ".lit.run_checkpoint",
        "StepProgress": ".lit.step_progress",
        "TokenBudgetSampler": ".data.token_budget",
        "TrainkitCLI": ".cli.lightning_cli",
        "TrainkitError": ".errors",
        "Uniform": ".core.strategies",
        "WandbRunLogger": ".cli.wandb_logger",
        "WeighNothing": ".data.filler",
        "WindowMonitor": ".lit.monitor",
        "WindowStats": ".core.window",
        "find_micro_batch": ".lit.find_micro_batch",
        "read_effective_batch": ".lit.effective",
        "warmup_cosine": ".core.curves",
    },
)
