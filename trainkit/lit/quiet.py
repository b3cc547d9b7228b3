"""Trainings aside, which are not to be heard."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

import lightning.pytorch  # noqa: F401  # it sets the level of its logger

ADVICE = (
    r".*treespec, LeafSpec.*",
    r".*does not have many workers.*",
    r".*max_epochs. was not set.*",
    r"You defined a .validation_step. but have no .*",
    r".*smaller than the logging interval.*",
)


LIGHTNINGS = ("lightning.pytorch", "pytorch_lightning", "lightning.fabric")


@contextlib.contextmanager
def logged_from(level: int) -> Iterator[None]:
    """Lightning's loggers say nothing below a level.

    To set one takes long, so those that have it, or a higher one, are left alone.
    """
    loggers = map(logging.getLogger, LIGHTNINGS)
    lower = [(each, each.level) for each in loggers if each.level < level]
    try:
        for each, _ in lower:
            each.setLevel(level)
        yield
    finally:
        for each, before in lower:
            each.setLevel(before)


@contextlib.contextmanager
def without_advice() -> Iterator[None]:
    """Lightning does not give the advice that is meant for a training."""
    with logged_from(logging.WARNING), warnings.catch_warnings():
        for known in ADVICE:
            warnings.filterwarnings("ignore", known)
        yield
