"""Looks for the metric of a run, and says which there are."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from omegaconf import DictConfig

from trainkit.cli.runs.folder import RunFolder
from trainkit.cli.words import key_of
from trainkit.errors import TrainkitError
from trainkit.lit._compat import has_own
from trainkit.lit.callback.table import say
from trainkit.lit.resume.run_checkpoint import ends_epoch

DEFAULT = "val/loss"
"""The metric of a run for which none was chosen."""
_OF_VALIDATION = re.compile(r"(val|valid|validation)([/_]|$)")


class MissingMetric(TrainkitError):
    """A metric that was chosen is logged by nothing."""


class Monitors(Checkpoint):
    """Looks for the metric of the run as soon as it must be there.

    A name such as `val/loss` must be there after the sanity check, or else the first
    validation; any other after the first epoch. If it is not, the training ends, or, if
    it is at its end anyway, the error is raised after the summary. If nobody has chosen
    the metric, there is only no best checkpoint. What other callbacks and schedulers
    monitor, Lightning looks for.

    Lightning calls a `Checkpoint` at an epoch's end when all has been logged; this one
    must come before all others.

    Args:
        config: the configuration of the run.
        words: the overrides of the command line.
        folder: the folder of the run.
    """

    late_place = 0

    def __init__(
        self, config: DictConfig, words: Sequence[str], folder: RunFolder
    ) -> None:
        self._metric, self._folder = str(config.metric or ""), folder
        if config.metric == "":
            raise MissingMetric("metric: must be a name or null, received ''.")
        is_named = "metric" in {key_of(word) for word in words}
        self._is_chosen = is_named or config.metric != DEFAULT
        self._is_of_validation = _OF_VALIDATION.match(self._metric) is not None
        self._is_of_test = bool(config.test) and self._metric.startswith("test")
        self._missing: MissingMetric | None = None
        self._waits_for_validation = True
        self._has_said = False

    def look_before(self, trainer: Any, module: Any, data: Any) -> None:
        """Refuse a metric of validation where there is none, and let wait for the test.

        Raises:
            MissingMetric: such a metric was chosen.
        """
        self._waits_for_validation = _has_validation(trainer, module, data)
        if self._is_of_test:
            self._do_without(trainer, f"{self._metric} is known after training")
        may_come = self._waits_for_validation or has_own(module, "on_train_epoch_end")
        if may_come or not self._is_of_validation:
            return
        why = f"{type(module).__name__} has no validation"
        if self._is_chosen:
            raise MissingMetric(
                f"metric: {self._metric} is logged by nothing, since {why} (a "
                f"validation_step, val_dataloader and trainer.limit_val_batches above "
                f"0). Choose a metric of the training, such as metric=window/loss"
            )
        self._do_without(trainer, why)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        is_trial = trainer.sanity_checking
        if not is_trial and trainer.state.fn == "fit":
            self._waits_for_validation = False
        has_logged = trainer.callback_metrics or not is_trial
        if self._is_of_validation and has_logged:  # a module may log nothing in a trial
            self._look(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if not self._waits_for_validation:
            self._look(trainer)

    def value(self, there: Mapping[str, Any]) -> float | None:
        """The metric of the run.

        Args:
            there: all metrics, also those of a test at the end.

        Raises:
            MissingMetric: a metric that was chosen was not logged.
        """
        metric = self._metric
        is_early = self._is_of_validation and self._waits_for_validation
        if metric and metric not in there:
            if self._is_chosen and not is_early:
                self._missing = self._missing or self._error(there)
            elif not self._has_said:
                rest = "it ended before its first validation"
                rest = rest if is_early else _there_are(there, metric)
                why = f"{metric} was not logged, so this run has no metric"
                print(f"trainkit | metric: {why}; {rest}")
        if self._missing is not None:
            raise self._missing
        return float(there[metric]) if metric in there else None

    def _look(self, trainer: Any) -> None:
        there, metric = trainer.callback_metrics, self._metric
        if not metric or metric in there or self._is_of_test:
            return
        if not self._is_chosen:
            why = f"{metric} is logged by nothing; {_there_are(there, metric)}"
            self._do_without(trainer, why)
            return
        is_over = _is_over(trainer)
        self._missing = self._missing or self._error(there, goes_on=not is_over)
        self._forget(trainer)
        if not is_over:
            raise self._missing

    def _error(self, there: Any, *, goes_on: bool = False) -> MissingMetric:
        said = _there_are(there, self._metric)
        text = f"metric: {self._metric} is logged by nothing; {said}"
        last = self._folder.newest_checkpoint() if goes_on else None
        if last is not None:
            path = shlex.quote(f"ckpt_path={last}")
            text += f"\nTo continue the run with another: trainkit train {path} ..."
        return MissingMetric(text)

    def _do_without(self, trainer: Any, why: str) -> None:
        if self._forget(trainer):
            self._has_said = True
            if trainer.is_global_zero:
                said = f"none, since {why}; last.ckpt is kept"
                say(trainer, ("best checkpoint", said))

    def _forget(self, trainer: Any) -> bool:
        """Save no best checkpoint by the metric; whether one would have been saved."""
        found = [
            each
            for each in trainer.callbacks
            if isinstance(each, ModelCheckpoint) and each.monitor == self._metric
            if each.save_top_k
        ]
        for each in found:
            each.save_top_k = 0
        return bool(found)


def _has_validation(trainer: Any, module: Any, data: Any) -> bool:
    if not has_own(module, "validation_step") or not trainer.limit_val_batches:
        return False
    if data is not None and not isinstance(data, LightningDataModule):
        return True
    owners = [each for each in (module, data) if each is not None]
    return any(has_own(owner, "val_dataloader") for owner in owners)


def _is_over(trainer: Any) -> bool:
    """Whether training ends here by itself, after what runs now."""
    if 0 <= trainer.max_steps <= trainer.global_step:
        return True
    epochs = trainer.max_epochs
    is_last = epochs not in (None, -1) and trainer.current_epoch + 1 >= epochs
    return is_last and ends_epoch(trainer)


def _there_are(there: Iterable[str], metric: str) -> str:
    """The names of all metrics, and how to choose one."""
    names = sorted(name for name in there if not name.startswith("lr-"))
    names.sort(key=lambda name: not _OF_VALIDATION.match(name))
    if not names:
        return "there are none. The module logs one with self.log."
    close = [name for name in names if name.startswith(f"{metric}/dataloader")]
    close += difflib.get_close_matches(metric, names, n=1, cutoff=0.0)
    return f"there are: {', '.join(names)}. Choose metric={close[0]}"
