from .cli.fit.cli import TrainkitCLI as TrainkitCLI
from .cli.wandb_logger import WandbRunLogger as WandbRunLogger
from .core.accumulator import Accumulator as Accumulator
from .core.class_weights import PerClassWeight as PerClassWeight
from .core.inside.forward import Chunked as Chunked
from .core.noise.estimate import NoiseEstimate as NoiseEstimate
from .core.noise.moments import NoiseMoments as NoiseMoments
from .core.plan.effective_batch import BatchPlan as BatchPlan
from .core.plan.effective_batch import EffectiveBatch as EffectiveBatch
from .core.plan.rates import warmup_cosine as warmup_cosine
from .core.said_weight import Weighed as Weighed
from .core.split.micro_batching import MicroBatching as MicroBatching
from .core.strategies import AccumulationStrategy as AccumulationStrategy
from .core.strategies import PerSample as PerSample
from .core.strategies import PerToken as PerToken
from .core.strategies import Uniform as Uniform
from .core.tape.forward import exact_batch_norm as exact_batch_norm
from .core.token_loss import TokenLoss as TokenLoss
from .core.window import WindowStats as WindowStats
from .data.filler import WeighNothing as WeighNothing
from .data.length_sampler import TokenBudgetSampler as TokenBudgetSampler
from .data.packing import PackCollate as PackCollate
from .data.padding import PadCollate as PadCollate
from .data.resumable import ResumableLoader as ResumableLoader
from .data.streams import ResumableStream as ResumableStream
from .data.window_sampler import WindowSampler as WindowSampler
from .errors import TrainkitError as TrainkitError
from .lit.batch_norm.guard import BatchNormGuard as BatchNormGuard
from .lit.batch_size import read_effective_batch as read_effective_batch
from .lit.front.callbacks import (
    AccumulationCallback as AccumulationCallback,
)
from .lit.front.check import check as check
from .lit.front.exact_resume import ExactResume as ExactResume
from .lit.front.mixin import AccumulationMixin as AccumulationMixin
from .lit.logs.metrics_csv import MetricsCSVLogger as MetricsCSVLogger
from .lit.logs.monitor import WindowMonitor as WindowMonitor
from .lit.logs.rows import LearningRates as LearningRates
from .lit.logs.rows import OneStep as OneStep
from .lit.logs.step_progress import StepProgress as StepProgress
from .lit.logs.summary import PlainComparison as PlainComparison
from .lit.noise import NoiseScale as NoiseScale
from .lit.probe.find import FoundMicroBatch as FoundMicroBatch
from .lit.probe.find import find_micro_batch as find_micro_batch
from .lit.proof.report import Report as Report
from .lit.rates.lr_scaling import LRScaling as LRScaling
from .lit.schedule import AccumulationSchedule as AccumulationSchedule

__version__: str
