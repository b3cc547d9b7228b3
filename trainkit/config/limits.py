"""Refuses numbers at which Lightning or NumPy would fail later."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from omegaconf import DictConfig, OmegaConf

from trainkit.config.targets import TARGET, locate
from trainkit.errors import TrainkitError
from trainkit.lit.logs.monitor import WindowMonitor

_LARGEST_SEED = 2**32 - 1


class Limit(NamedTuple):
    """The numbers that a setting may have."""

    key: str
    rule: str
    allows: Callable[[float], bool]
    remedy: str


_LIMITS = (
    Limit(
        "trainer.accumulate_grad_batches",
        "at least 1",
        lambda number: number >= 1,
        "1 takes an optimizer step after each micro-batch.",
    ),
    Limit(
        "trainer.val_check_interval",
        "above 0",
        lambda number: number > 0,
        "trainer.limit_val_batches=0 leaves validation out.",
    ),
    Limit(
        "trainer.check_val_every_n_epoch",
        "at least 1",
        lambda number: number >= 1,
        "trainer.limit_val_batches=0 leaves validation out; null counts "
        "trainer.val_check_interval across epochs.",
    ),
    Limit(
        "trainer.log_every_n_steps",
        "at least 0",
        lambda number: number >= 0,
        "0 logs no step.",
    ),
    Limit(
        "trainer.gradient_clip_val",
        "at least 0",
        lambda number: number >= 0,
        "null and 0 clip nothing.",
    ),
    Limit(
        "seed",
        f"from 0 to {_LARGEST_SEED}",
        lambda number: 0 <= number <= _LARGEST_SEED,
        "null leaves the random generators alone.",
    ),
)


def check_limits(config: DictConfig) -> None:
    """Refuse numbers out of range, and an unknown mode."""
    for key, rule, allows, remedy in _LIMITS:
        value = OmegaConf.select(config, key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and not allows(value):
            raise TrainkitError(f"{key}: must be {rule}, received {value}. {remedy}")
    if config.mode not in ("min", "max"):
        raise TrainkitError(
            f"mode: must be min or max, received {config.mode!r}. Choose max for a "
            f"metric that should grow, such as an accuracy."
        )
    for name, node in (config.callbacks or {}).items():
        if node and locate(node[TARGET]) is WindowMonitor:
            _refuse_no_steps(f"callbacks.{name}", node.get("every_n_steps"))


def refuse_no_end(trainer: DictConfig) -> None:
    """Refuse a training for which nothing says when it ends."""
    ends = [trainer.get(key) for key in ("max_epochs", "max_time", "fast_dev_run")]
    if any(end is not None and end is not False for end in ends):
        return
    if trainer.get("max_steps", -1) == -1:
        raise TrainkitError(
            "trainer.max_epochs: a training needs an end, and none is given. Add "
            "trainer.max_epochs=10, or trainer.max_steps=1000."
        )


def _refuse_no_steps(key: str, every_n_steps: int | None) -> None:
    """Refuse a monitor at 0 steps, which to Lightning mean no logging."""
    if every_n_steps is not None and every_n_steps < 1:
        raise TrainkitError(
            f"{key}.every_n_steps: must be at least 1, received {every_n_steps}; in "
            f"callbacks=default it is trainer.log_every_n_steps. {key}=null leaves the "
            f"monitor out, {key}.every_n_steps=50 keeps it."
        )
