"""`trainkit train`: a Hydra application."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from trainkit.cli import resume
from trainkit.cli.sweep.whole_config import for_train
from trainkit.config.conf import PACKAGE, register

_ONLY_SHOWS = {"--help", "-h", "--hydra-help", "--cfg", "-c", "--info", "-i"}
_ONLY_SHOWS |= {"--shell-completion", "-sc", "--version"}
_MULTIRUN = {"-m", "--multirun"}


class _JobEnded(BaseException):
    """Carries a job's error through Hydra, which would print a line of its own."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def main(argv: list[str]) -> int:
    """Compose the configuration and train; with `-m`, train once for each choice."""
    register()
    argv = sorted(argv, key=lambda word: word not in _MULTIRUN)  # Hydra wants it first
    if not any(word.partition("=")[0] in _ONLY_SHOWS for word in argv):
        argv = resume.expand(for_train(argv))
    with _as_program("trainkit train", argv), _errors_come_through():
        app = hydra.main(version_base="1.3", config_path=PACKAGE, config_name="train")
        try:
            app(run_job)()
        except _JobEnded as ended:
            raise ended.error from ended.error.__cause__  # not from this errand
    return 0


def run_job(config: DictConfig) -> float | None:
    """One training. What it returns is what a sweeper optimises."""
    from trainkit.cli.job import run

    try:
        return run(config)
    except Exception as error:
        if HydraConfig.get().mode is RunMode.RUN:
            raise _JobEnded(error) from error
        raise  # one of many, and Hydra's to count


@contextmanager
def _as_program(name: str, argv: list[str]) -> Iterator[None]:
    """Hydra reads `sys.argv`, and knows no sub-commands."""
    before = sys.argv
    sys.argv = [before[0] if before else name, *argv]
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def _errors_come_through() -> Iterator[None]:
    """Hydra would print errors itself and exit with 1, whosever the mistake is."""
    variable: Any = "HYDRA_FULL_ERROR"
    before = os.environ.get(variable)
    os.environ[variable] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before
