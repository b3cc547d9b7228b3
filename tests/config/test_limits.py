"""Settings that would break down later are refused before anything is made."""

from __future__ import annotations

import math
from typing import Any

import pytest
from omegaconf import OmegaConf

from trainkit import TrainkitError
from trainkit.config.limits import check_limits


def check(key: str = "seed", value: Any = 0) -> None:
    config = OmegaConf.create(
        {"trainer": {}, "seed": 0, "mode": "min", "checks": "late"}
    )
    OmegaConf.update(config, key, value)
    check_limits(config)


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("trainer.accumulate_grad_batches", 0, "at least 1"),
        ("trainer.val_check_interval", 0, "above 0"),
        ("trainer.val_check_interval", 0.0, "above 0"),
        ("trainer.val_check_interval", -0.5, "above 0"),
        ("trainer.val_check_interval", math.nan, "above 0"),
        ("trainer.check_val_every_n_epoch", 0, "at least 1"),
        ("trainer.log_every_n_steps", -1, "at least 0"),
        ("trainer.gradient_clip_val", -1, "at least 0"),
        ("trainer.gradient_clip_val", math.nan, "at least 0"),
        ("seed", -1, "from 0 to 4294967295"),
        ("seed", 2**32, "from 0 to 4294967295"),
        ("mode", "foo", "min or max"),
        ("checks", "never", "late or now"),
    ],
)
def test_beyond_a_limit(key: str, value: Any, rule: str) -> None:
    with pytest.raises(TrainkitError, match=rf"^{key}: must be {rule}, received"):
        check(key, value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.accumulate_grad_batches", 1),
        ("trainer.val_check_interval", 0.25),
        ("trainer.val_check_interval", "00:00:05:00"),
        ("trainer.val_check_interval", {"minutes": 5}),
        ("trainer.val_check_interval", None),
        ("trainer.check_val_every_n_epoch", None),
        ("trainer.log_every_n_steps", 0),
        ("trainer.gradient_clip_val", 0),
        ("trainer.gradient_clip_val", None),
        ("seed", None),
        ("seed", 2**32 - 1),
        ("mode", "max"),
        ("checks", "now"),
    ],
)
def test_within_the_limits(key: str, value: Any) -> None:
    check(key, value)
