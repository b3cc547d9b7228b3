"""W&B as Hydra's sweeper: `trainkit train -m hydra/sweeper=wandb`."""

from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class WandbSweeperConf:
    """Its options; those of the same name are as in Optuna's sweeper."""

    _target_: str = "hydra_plugins.trainkit_wandb.WandbSweeper"
    method: str = "random"  # or bayes, or grid
    n_trials: int | None = None  # 20, or all of a grid
    n_jobs: int = 1  # trials at once, for launchers that run several
    metric: Any = "${metric}"
    goal: Any = "${trainkit.direction:${mode}}"
    params: Any = None  # what is swept, beside the command line
    project: str | None = None  # WANDB_PROJECT, or else trainkit
    entity: str | None = None
    name: str | None = None
    early_terminate: Any = None  # {type: hyperband, min_iter: 3}
    seed: Any = "${seed}"  # of the search without a server


class WandbSweeper(Sweeper):
    """Runs the trials of a W&B sweep; Hydra finds sweepers in `hydra_plugins` only."""

    def __init__(self, **options: Any) -> None:
        self._options = options

    def setup(
        self,
        *,
        hydra_context: HydraContext,
        task_function: TaskFunction,
        config: DictConfig,
    ) -> None:
        from trainkit.cli.hydra_sweeper.sweep import HydraSweep

        self._sweep = HydraSweep(self._options, hydra_context, task_function, config)

    def sweep(self, arguments: list[str]) -> None:
        self._sweep.run(arguments)


ConfigStore.instance().store(
    group="hydra/sweeper", name="wandb", node=WandbSweeperConf, provider="trainkit"
)
