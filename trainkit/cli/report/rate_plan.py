"""Writes the planned learning rates when a training begins."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lightning.pytorch import Callback

from trainkit.cli.runs.folder import RunFolder
from trainkit.core.rate_plan import RatePlan
from trainkit.lit.rates.planned_rates import plan_rates


class RatePlanFile(Callback):
    """Writes `learning_rate_plan.json`; a resumed run replaces the steps to come.

    This callback must come after `LRScaling` and `LearningRates`.

    Args:
        folder: the folder of the run.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return
        plan = plan_rates(trainer, pl_module)
        if trainer.global_step:
            before = RatePlan.of_json(self.folder.read_rate_plan())
            plan = before.from_step(trainer.global_step, plan)
        try:
            self.folder.write_rate_plan(asdict(plan))
        except OSError as error:  # a training must not fail because of its report
            print(f"trainkit | learning rates: no plan of them: {error}", flush=True)
