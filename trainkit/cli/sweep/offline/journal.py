"""The trials of an offline sweep in Optuna's journal, which survives any kill."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from trainkit.cli.sweep.offline.search import draw, grid, nested, sampler
from trainkit.cli.sweep.sweep_file import SweepFile
from trainkit.cli.sweep.trial import Trial
from trainkit.errors import TrainkitError

FILE = "journal.log"

optuna.logging.set_verbosity(optuna.logging.WARNING)


class Journal:
    """A sweep's trials, kept in `<folder>/journal.log`; it belongs to one process.

    Optuna's own trials have what it needs to propose. The rest is in attributes of the
    study, one for each trial. A proposal depends only on the seed and the trials before
    it, so a sweep that is resumed after a kill proposes what it would have proposed.

    Args:
        sweep: the sweep file.
        folder: the sweep's, which exists; its name is the sweep's id.
        seed: of a new sweep.

    Raises:
        TrainkitError: the folder has the journal of another sweep.
    """

    def __init__(self, sweep: SweepFile, folder: Path, *, seed: str = "") -> None:
        path = folder / FILE
        path.with_name(f"{FILE}.lock").unlink(missing_ok=True)  # of a killed process
        written = path.read_bytes() if path.exists() else b""
        if not written.endswith(b"\n"):  # it was killed in the middle of a line
            path.write_bytes(written[: written.rfind(b"\n") + 1])
        self._study = optuna.create_study(
            study_name=folder.name,
            storage=JournalStorage(JournalFileBackend(str(path))),
            direction="maximize" if sweep.maximizes else "minimize",
            load_if_exists=True,
        )
        trials = self._study.user_attrs
        begun = trials.pop("begun", None) or {"seed": seed, "config": sweep.config}
        if begun["config"] != sweep.config:
            raise TrainkitError(
                f"trainkit sweep --resume: {sweep.path} has changed since "
                f"{folder.name} was started. Change it back, or leave --resume out to "
                f"start a new sweep."
            )
        self._study.set_user_attr("begun", begun)
        self.folder = folder
        self.trials = [Trial(**each) for each in trials.values()]
        self._sweep = sweep
        self._seed = begun["seed"]
        self._points = grid(sweep) if sweep.method == "grid" else None

    def propose(self) -> Trial | None:
        """The next trial, or None at the sweep's end."""
        count, size = len(self.trials), len(self._points or ())
        if count == self._sweep.run_cap or (self._points is not None and count == size):
            return None
        self._tell()
        self._study.sampler = sampler(self._sweep, f"{self._seed}/{count}")
        asked = self._study.ask()
        leaves = self._sweep.leaves.items()
        values = (
            self._points[count]
            if self._points
            else {name: draw(asked, name, parameter) for name, parameter in leaves}
        )
        name = f"{self.folder.name}-{count:03d}"
        arguments = nested(self._sweep.parameters, values)
        folder = str(self.folder / name)
        trial = Trial(name=name, arguments=arguments, folder=folder, asked=asked.number)
        self.trials.append(trial)
        return trial

    def save(self, trial: Trial) -> None:
        """Write a trial's state in one line."""
        self._study.set_user_attr(trial.name, asdict(trial))

    def _tell(self) -> None:
        """Tell Optuna all results; one that was stopped counts with its last value.

        A trial that only Optuna knows is the half of a proposal that a kill cut off.
        """
        known = {trial.asked: trial for trial in self.trials}
        for asked in self._study.get_trials(states=[TrialState.RUNNING]):
            trial = known.get(asked.number)
            if trial is None or trial.is_over:
                is_result = trial is not None and trial.state != "crashed"
                value = trial.number if trial and is_result else None
                state = TrialState.FAIL if value is None else TrialState.COMPLETE
                self._study.tell(asked.number, value, state=state)
