"""Looks for the metric of a run, and says which there are."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from omegaconf import DictConfig

from trainkit.cli.words import key_of
from trainkit.errors import TrainkitError
from trainkit.lit.callback.table import say

DEFAULT = "val/loss"
"""The metric of a run for which none was chosen."""
_OF_VALIDATION = re.compile(r"(val|valid|validation)([/_]|$)")


class Monitors(Checkpoint):
    """Looks for the metric of the run as soon as it must be there.

    A name such as `val/loss` must be there after the sanity check, or else the first
    validation; any other after the first epoch, and that of a test at the end. Without
    it there is no best checkpoint, and a line says so. If it was chosen, the error is
    raised in the sanity check, or else at the end. What other callbacks and schedulers
    monitor, Lightning looks for.

    Lightning calls a `Checkpoint` at an epoch's end when all has been logged; this one
    must come before all others.

    Args:
        config: the configuration of the run.
        words: the overrides of the command line.
    """

    late_place = 0

    def __init__(self, config: DictConfig, words: Sequence[str]) -> None:
        self._metric = str(config.metric or "")
        if config.metric == "":
            raise TrainkitError("metric: must be a name or null, received ''.")
        is_named = "metric" in {key_of(word) for word in words}
        self._is_chosen = is_named or config.metric != DEFAULT
        self._is_of_validation = _OF_VALIDATION.match(self._metric) is not None
        self._is_of_test = self._metric.startswith("test")
        self._waits_for_validation = True

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._waits_for_validation = trainer.enable_validation
        if self._is_of_test:
            self._do_without(trainer, f"{self._metric} is known after training")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._waits_for_validation = False
        has_logged = trainer.callback_metrics or not trainer.sanity_checking
        if self._is_of_validation and has_logged:  # a module may log nothing in a trial
            self._look(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if not self._waits_for_validation and not self._is_of_test:
            self._look(trainer)

    def value(self, there: Mapping[str, Any]) -> float | None:
        """The metric of the run; None if it has none, and none was chosen.

        Args:
            there: all metrics, also those of a test at the end.

        Raises:
            TrainkitError: a metric that was chosen was not logged.
        """
        if self._metric in there:
            return float(there[self._metric])
        is_early = self._is_of_validation and self._waits_for_validation
        if self._metric and self._is_chosen and not is_early:
            raise self._error(there)
        return None

    def _look(self, trainer: Any) -> None:
        there = trainer.callback_metrics
        if not self._metric or self._metric in there:
            return
        if self._is_chosen and trainer.sanity_checking:
            raise self._error(there)
        why = f"{self._metric} is logged by nothing; {_there_are(there, self._metric)}"
        self._do_without(trainer, why)

    def _error(self, there: Iterable[str]) -> TrainkitError:
        said = _there_are(there, self._metric)
        return TrainkitError(f"metric: {self._metric} is logged by nothing; {said}")

    def _do_without(self, trainer: Any, why: str) -> None:
        """Save no best checkpoint by the metric, and say so once."""
        found = [
            each
            for each in trainer.callbacks
            if isinstance(each, ModelCheckpoint) and each.monitor == self._metric
            if each.save_top_k
        ]
        for each in found:
            each.save_top_k = 0
        if found:
            said = f"none, since {why}; last.ckpt is kept"
            say(trainer, ("best checkpoint", said))


def _there_are(there: Iterable[str], metric: str) -> str:
    """The names of all metrics, and how to choose one."""
    names = sorted(name for name in there if not name.startswith("lr-"))
    names.sort(key=lambda name: not _OF_VALIDATION.match(name))
    if not names:
        return "there are none. The module logs one with self.log."
    close = [name for name in names if name.startswith(f"{metric}/dataloader")]
    close += difflib.get_close_matches(metric, names, n=1, cutoff=0.0)
    return f"there are: {', '.join(names)}. Choose metric={close[0]}"
