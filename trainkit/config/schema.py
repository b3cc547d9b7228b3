"""The types of the root configuration, by which Hydra refuses a wrong key or type.

The arguments of a `_target_` are not listed here, the Trainer's neither:
`trainkit.config.check` takes their types from the signature of the target.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from omegaconf import MISSING

# OmegaConf 2.3 reads the old spelling of unions only.
# ruff: noqa: UP045


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
    trainer: Any = None
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
    report: bool = True
    pictures: bool = True
