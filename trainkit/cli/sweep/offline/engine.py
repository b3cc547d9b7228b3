"""W&B's own search engine, the `sweeps` package, without a server."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from trainkit.cli.sweep.trial import WANDB_STATES, Trial
from trainkit.errors import TrainkitError


class Engine:
    """Proposes trials, and selects those to stop.

    A proposal depends only on the seed and the trials. A sweep that is resumed after a
    kill therefore proposes what it would have proposed.

    Args:
        config: the sweep, in W&B's format.
        seed: the start of random proposals.
        who: the command, for messages.

    Raises:
        TrainkitError: `sweeps` is not installed.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        seed: str | int,
        who: str = "trainkit sweep --offline",
    ) -> None:
        self._sweeps = _import(who)
        self._config = dict(config)
        self._seed = seed

    def propose(self, trials: Sequence[Trial]) -> dict[str, Any] | None:
        """The next trial's arguments as plain Python, or None at the sweep's end.

        Raises:
            TrainkitError: the engine refuses the sweep.
        """
        cap = self._config.get("run_cap")  # the engine does not look at it
        if cap is not None and len(trials) >= cap:
            return None
        with self._asking(len(trials)):
            found = self._sweeps.next_run(self._config, self._runs(trials))
        if found is None:
            return None
        return {name: _plain(entry["value"]) for name, entry in found.config.items()}

    def to_stop(self, trials: Sequence[Trial]) -> set[str]:
        """The names of running trials that hyperband would stop now."""
        if self._config.get("early_terminate") is None:
            return set()
        with self._asking(len(trials)):
            found = self._sweeps.stop_runs(self._config, self._runs(trials))
        return {run.name for run in found}

    def _runs(self, trials: Sequence[Trial]) -> list[Any]:
        metric = (self._config.get("metric") or {}).get("name")
        return [
            self._sweeps.SweepRun(
                name=trial.name,
                config={k: {"value": value} for k, value in trial.arguments.items()},
                state=self._sweeps.RunState(WANDB_STATES[trial.state]),
                history=[{metric: value} for value in trial.metric],
                summary_metrics={metric: trial.value} if trial.metric else {},
            )
            for trial in trials
        ]

    @contextmanager
    def _asking(self, num_trials: int) -> Iterator[None]:
        """Seed the global generators for the engine, and restore them afterwards."""
        import numpy as np

        states = random.getstate(), np.random.get_state()
        drawing = random.Random(f"{self._seed}/{num_trials}")
        random.seed(drawing.getrandbits(64))
        np.random.seed(drawing.getrandbits(32))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the optimizer's, about its fits
                yield
        except Exception as error:  # jsonschema's errors are not ValueErrors
            raise TrainkitError(
                f"sweep: W&B's engine refuses it: {type(error).__name__}: {error}"
            ) from error
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def _import(who: str) -> ModuleType:
    try:
        with warnings.catch_warnings():
            # Its model uses a name of pydantic 1, which warns at each import.
            warnings.simplefilter("ignore")
            import sweeps
    except ImportError as error:
        raise TrainkitError(
            f"{who}: without a server it needs W&B's engine, the package `sweeps`, "
            f"which is not installed. Run pip install 'lightning-trainkit[sweeps]'."
        ) from error
    return sweeps


def _plain(value: Any) -> Any:
    """A value without numpy's types, which YAML and command lines cannot hold."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value.item() if hasattr(value, "item") else value
