"""The types of the root configuration, by which Hydra refuses a wrong key or type.

The arguments of a `_target_` in a group are not listed here: `trainkit.config.check`
takes their types from the signature of the target.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional, Union

from omegaconf import MISSING

# OmegaConf 2.3 reads the old spelling of unions only.
# ruff: noqa: UP007, UP045


@dataclass
class TrainerSchema:
    """The arguments of `lightning.pytorch.Trainer`, except `logger` and `callbacks`,
    which have groups of their own."""

    _target_: str = "lightning.pytorch.Trainer"
    accelerator: str = "auto"
    strategy: Any = "auto"
    devices: Any = "auto"
    num_nodes: int = 1
    precision: Optional[Union[int, str]] = None
    fast_dev_run: Union[bool, int] = False
    max_epochs: Optional[int] = None
    min_epochs: Optional[int] = None
    max_steps: int = -1
    min_steps: Optional[int] = None
    max_time: Any = None
    limit_train_batches: Optional[Union[int, float]] = None
    limit_val_batches: Optional[Union[int, float]] = None
    limit_test_batches: Optional[Union[int, float]] = None
    limit_predict_batches: Optional[Union[int, float]] = None
    overfit_batches: Union[int, float] = 0.0
    val_check_interval: Any = None
    check_val_every_n_epoch: Optional[int] = 1
    num_sanity_val_steps: Optional[int] = None
    log_every_n_steps: Optional[int] = None
    enable_checkpointing: Optional[bool] = None
    enable_progress_bar: Optional[bool] = None
    enable_model_summary: Optional[bool] = None
    accumulate_grad_batches: int = 1
    gradient_clip_val: Optional[Union[int, float]] = None
    gradient_clip_algorithm: Optional[str] = None
    deterministic: Optional[Union[bool, str]] = None
    benchmark: Optional[bool] = None
    inference_mode: bool = True
    use_distributed_sampler: bool = True
    profiler: Any = None
    detect_anomaly: bool = False
    barebones: bool = False
    plugins: Any = None
    sync_batchnorm: bool = False
    reload_dataloaders_every_n_epochs: int = 0
    default_root_dir: Optional[str] = "${paths.run_dir}"
    enable_autolog_hparams: bool = True
    model_registry: Optional[str] = None


@dataclass
class PathsSchema:
    """The folders of a run."""

    root_dir: str = MISSING
    output_dir: str = MISSING
    run_dir: str = MISSING


@dataclass
class SchedulingSchema:
    """The interval of the scheduler, and its metric."""

    interval: str = "step"
    monitor: Optional[str] = None


@dataclass
class TrainSchema:
    """The root: an entry for each group, and entries that belong to no group."""

    accumulation: Any = None
    micro_batching: Any = None
    lr_scaling: Any = None
    batchnorm: Any = None
    schedule: Any = None
    model: Any = None
    data: Any = None
    optimizer: Any = None
    scheduler: Any = None
    trainer: TrainerSchema = field(default_factory=TrainerSchema)
    logger: Any = None
    callbacks: Any = None
    paths: PathsSchema = field(default_factory=PathsSchema)
    scheduling: SchedulingSchema = field(default_factory=SchedulingSchema)
    name: str = MISSING
    seed: Optional[int] = None
    wide_gradients: bool = False
    tags: Optional[list[str]] = None
    checks: str = "late"
    proof: str = "warn"
    ckpt_path: Optional[str] = None
    metric: Optional[str] = None
    mode: str = "min"
    test: bool = False
    pictures: bool = True
