"""Writes the planned learning rates, and the names of what is shown beside them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateMonitor

from trainkit.cli.runs.folder import RunFolder
from trainkit.core.gradients import parameters_of
from trainkit.core.plan.rate_plan import RatePlan
from trainkit.core.strategies import PerSample, PerToken, Uniform
from trainkit.lit.callback.base import find_callback, windows_of
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
        plan = replace(
            plan_rates(trainer, pl_module),
            unit=unit_of_weights(trainer),
            optimizers=_optimizers(trainer, pl_module),
        )
        if trainer.global_step:
            before = RatePlan.of_json(self.folder.read_rate_plan())
            plan = before.from_step(trainer.global_step, plan)
        try:
            self.folder.write_rate_plan(asdict(plan))
        except OSError as error:  # a training must not fail because of its report
            print(f"trainkit | learning rates: no plan of them: {error}", flush=True)


def unit_of_weights(trainer: Any) -> str:
    """What the weights of windows count; empty if it has no name."""
    windows = windows_of(trainer)
    strategy = None if windows is None else windows.strategy
    units = {PerToken: "tokens", PerSample: "samples", Uniform: "micro-batches"}
    return next((units[kind] for kind in units if isinstance(strategy, kind)), "")


def _optimizers(trainer: Any, pl_module: Any) -> dict[str, str]:
    """The name of each of several optimizers, by the beginnings of its columns."""
    if len(trainer.optimizers) < 2:
        return {}
    names = _names(trainer.optimizers, pl_module)
    found = {f"window/{index}/": name for index, name in enumerate(names)}
    monitor = find_callback(trainer, LearningRateMonitor)
    # Lightning names the rates of optimizers with a scheduler first.
    first = [config.scheduler.optimizer for config in trainer.lr_scheduler_configs]
    order = [next(i for i, o in enumerate(trainer.optimizers) if o is f) for f in first]
    order += [index for index in range(len(names)) if index not in order]
    columns = [] if monitor is None else list(monitor.lrs)
    if len(columns) == len(order):  # one group of parameters each
        rates = zip(columns, order, strict=True)
        found |= {column: names[index] for column, index in rates}
    return found


def _names(optimizers: Iterable[Any], pl_module: Any) -> list[str]:
    """The submodules that each optimizer trains, or else its class and a number."""
    places = {
        id(parameter): name.partition(".")[0]
        for name, parameter in pl_module.named_parameters()
    }
    trained = [
        dict.fromkeys(places.get(id(p), "") for p in parameters_of(optimizer))
        for optimizer in optimizers
    ]
    names = [" and ".join(each) for each in trained]
    if len(set(names)) == len(names) and all(len(each) < 3 for each in trained):
        return names
    return [f"{type(o).__name__} {n}" for n, o in enumerate(optimizers, 1)]
