"""The trials of an offline sweep in Optuna's journal, which survives any kill."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from trainkit.cli.sweep.offline.search import Search
from trainkit.cli.sweep.trial import Trial
from trainkit.errors import TrainkitError

FILE = "journal.log"


class Journal:
    """A sweep's trials, kept in `<folder>/journal.log`; it belongs to one process.

    Optuna's own trials have what it needs to propose. The rest is in attributes of the
    study, one for each trial, since they may still change when a trial has ended.

    Attributes:
        folder: the sweep's; its name is the sweep's id.
        config: the sweep file's content when the sweep was started.
        trials: all of them, in the order in which they were proposed.
        search: what proposes them.
    """

    def __init__(self, folder: Path, study: optuna.Study) -> None:
        attributes = study.user_attrs
        self.folder = folder
        self.config: dict[str, Any] = attributes.pop("config")
        self.search = Search(self.config, seed=attributes.pop("seed"))
        self.trials = [Trial(**each["trial"]) for each in attributes.values()]
        self._study = study
        self._numbers = {name: each["number"] for name, each in attributes.items()}
        self._mend()

    @classmethod
    def create(cls, folder: Path, config: dict[str, Any], *, seed: str) -> Journal:
        """Begin a sweep in a folder that exists."""
        study = optuna.create_study(
            study_name=folder.name,
            storage=_storage(folder),
            direction=Search(config, seed=seed).direction,
        )
        study.set_user_attr("seed", seed)
        study.set_user_attr("config", config)
        return cls(folder, study)

    @classmethod
    def load(cls, folder: Path) -> Journal:
        """Read a sweep that was begun, maybe by a process that was killed."""
        path = folder / FILE
        path.with_name(f"{FILE}.lock").unlink(missing_ok=True)
        written = path.read_bytes()
        if not written.endswith(b"\n"):  # it was killed in the middle of a line
            path.write_bytes(written[: written.rfind(b"\n") + 1])
        study = optuna.load_study(study_name=folder.name, storage=_storage(folder))
        return cls(folder, study)

    def propose(self) -> Trial | None:
        """The next trial, or None at the sweep's end."""
        count = len(self.trials)
        if self.search.is_over(count):
            return None
        number, arguments = self.search.propose(self._study, count)
        trial = Trial(name=f"{self.folder.name}-{count:03d}", arguments=arguments)
        trial.folder = str(self.folder / trial.name)
        self._numbers[trial.name] = number
        self.trials.append(trial)
        return trial

    def save(self, trial: Trial) -> None:
        """Write a trial's state in one line, and its result if it is over."""
        content = {"number": self._numbers[trial.name], "trial": asdict(trial)}
        self._study.set_user_attr(trial.name, content)
        self._tell(trial)

    def _tell(self, trial: Trial) -> None:
        """Tell Optuna a result; one that was stopped counts with its last value."""
        if not trial.is_over:
            return
        value = None if trial.state == "crashed" else trial.number
        state = TrialState.FAIL if value is None else TrialState.COMPLETE
        number = self._numbers[trial.name]
        self._study.tell(number, value, state=state, skip_if_finished=True)

    def _mend(self) -> None:
        """Do what a kill has cut off: tell results, and forget half a proposal."""
        for trial in self.trials:
            self._tell(trial)
        known = self._numbers.values()
        for asked in self._study.get_trials(states=[TrialState.RUNNING]):
            if asked.number not in known:
                self._study.tell(asked.number, state=TrialState.FAIL)


def check_exists(folder: Path) -> None:
    """Refuse to resume a sweep that is not there.

    Raises:
        TrainkitError: the folder has no journal.
    """
    if not (folder / FILE).is_file():
        known = sorted(path.parent.name for path in folder.parent.glob(f"*/{FILE}"))
        raise TrainkitError(
            f"trainkit sweep --resume: there is no sweep {folder.name!r} in "
            f"{folder.parent}. There are: {', '.join(known) or 'none'}."
        )


def _storage(folder: Path) -> JournalStorage:
    return JournalStorage(JournalFileBackend(str(folder / FILE)))
