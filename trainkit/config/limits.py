"""Refuses numbers at which Lightning or NumPy would fail later."""

from __future__ import annotations

import math
from typing import get_args

from omegaconf import DictConfig, OmegaConf

from trainkit.core.checks import Checks
from trainkit.errors import TrainkitError

_LARGEST_SEED = 2**32 - 1
_NO_VALIDATION = "trainer.limit_val_batches=0 leaves validation out."

_AT_LEAST = {
    "trainer.accumulate_grad_batches": (1, "1 steps after each micro-batch."),
    "trainer.check_val_every_n_epoch": (1, f"{_NO_VALIDATION} null counts batches."),
    "trainer.log_every_n_steps": (0, "0 logs no step."),
    "trainer.gradient_clip_val": (0, "null and 0 clip nothing."),
}

_CHOICES = (
    ("mode", ("min", "max"), "Choose max for a metric that should grow."),
    ("checks", get_args(Checks), "now stops before the step of a bad loss."),
)


def check_limits(config: DictConfig) -> None:
    """Refuse numbers out of range, and unknown choices."""
    for key, (least, remedy) in _AT_LEAST.items():
        _check(config, key, least, math.inf, f"at least {least}", remedy)
    interval = "trainer.val_check_interval"
    _check(config, interval, math.ulp(0.0), math.inf, "above 0", _NO_VALIDATION)
    seeds = f"from 0 to {_LARGEST_SEED}"
    remedy = "null leaves the random generators alone."
    _check(config, "seed", 0, _LARGEST_SEED, seeds, remedy)
    for key, choices, remedy in _CHOICES:
        if config[key] not in choices:
            known = " or ".join(choices)
            raise TrainkitError(
                f"{key}: must be {known}, received {config[key]!r}. {remedy}"
            )


def _check(
    config: DictConfig, key: str, least: float, most: float, rule: str, remedy: str
) -> None:
    value = OmegaConf.select(config, key)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and not least <= value <= most:
        raise TrainkitError(f"{key}: must be {rule}, received {value}. {remedy}")


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
