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


@contextlib.contextmanager
def without_advice() -> Iterator[None]:
    """Lightning does not give the advice that is meant for a training."""
    names = "lightning.pytorch", "pytorch_lightning"
    loggers = [(each, each.level) for each in map(logging.getLogger, names)]
    with warnings.catch_warnings():
        for known in ADVICE:
            warnings.filterwarnings("ignore", known)
        for logger, level in loggers:
            logger.setLevel(max(level, logging.WARNING))
        try:
            yield
        finally:
            for logger, level in loggers:
                logger.setLevel(level)
