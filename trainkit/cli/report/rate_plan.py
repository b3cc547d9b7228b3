"""Writes what the weights of windows count."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from trainkit.cli.runs.folder import RunFolder
from trainkit.core.strategies import PerSample, PerToken, Uniform
from trainkit.lit.callback.base import windows_of


class RatePlanFile(Callback):
    """Writes the unit of weights to `learning_rate_plan.json` when training begins.

    A resumed run keeps it.

    Args:
        folder: the folder of the run.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        is_known = (self.folder.path / self.folder.RATE_PLAN).is_file()
        is_resumed = trainer.global_step > 0 and is_known
        if is_resumed or not trainer.is_global_zero or trainer.fast_dev_run:
            return
        try:
            self.folder.write_rate_plan({"unit": unit_of_weights(trainer)})
        except OSError as error:  # a training must not fail because of its report
            print(f"trainkit | report: not its unit of weights: {error}", flush=True)


def unit_of_weights(trainer: Any) -> str:
    """What the weights of windows count; empty if it has no name."""
    windows = windows_of(trainer)
    strategy = None if windows is None else windows.strategy
    units = {PerToken: "tokens", PerSample: "samples", Uniform: "micro-batches"}
    return next((units[kind] for kind in units if isinstance(strategy, kind)), "")
