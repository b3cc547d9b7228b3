"""Trials of W&B's own engine, for Hydra's sweeper without a server."""

from __future__ import annotations

from typing import Any

from trainkit.cli.hydra_sweeper.space import WHERE
from trainkit.cli.sweep.offline.engine import Engine
from trainkit.cli.sweep.sweep_file import SweepFile
from trainkit.cli.sweep.trial import Trial
from trainkit.errors import TrainkitError


class OfflineSource:
    """Proposes trials with W&B's engine.

    Args:
        sweep: the sweep.
        name: its name, which is the group of its trials in W&B.
        n_jobs: how many trials run at once.
        seed: the engine's.

    Raises:
        TrainkitError: the sweep needs a server, or the engine is not installed.
    """

    was_asked_to_stop = False

    def __init__(self, sweep: SweepFile, *, name: str, n_jobs: int, seed: Any) -> None:
        if sweep.config.get("early_terminate") is not None:
            raise TrainkitError(
                "hydra.sweeper.early_terminate: needs a W&B server, and there is none. "
                "Leave it out, or write the sweep into a file: `trainkit sweep FILE "
                "--offline` stops trials without a server."
            )
        self._engine = Engine(sweep.config, seed=seed, who=WHERE)
        self._name = name
        self._n_jobs = n_jobs

    def next_trials(self, trials: list[Trial]) -> list[Trial]:
        """The next trials to run together; none at the end."""
        found: list[Trial] = []
        while len(found) < self._n_jobs:
            arguments = self._engine.propose([*trials, *found])
            if arguments is None:
                break
            number = len(trials) + len(found)
            name = f"{self._name}-{number:03d}"
            found.append(Trial(name=name, arguments=arguments, state="running"))
        return found

    def environment(self, trial: Trial) -> dict[str, str]:
        """The variables of a trial's job."""
        return {"WANDB_RUN_GROUP": self._name}

    def end(self, trial: Trial) -> None:
        """Take note that a trial has ended."""

    def close(self) -> None:
        """Leave nothing behind."""
