"""Looks for the metrics that a run monitors, and says which there are."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ModelCheckpoint
from omegaconf import DictConfig

from trainkit.cli.runs.folder import RunFolder
from trainkit.cli.words import key_of
from trainkit.errors import TrainkitError
from trainkit.lit._compat import has_own
from trainkit.lit.callback.table import say
from trainkit.lit.resume.between_steps import ends_epoch

DEFAULT = "val/loss"
"""The metric of a run for which none was chosen."""
_OF_VALIDATION = re.compile(r"(val|valid|validation)([/_]|$)")


class MissingMetric(TrainkitError):
    """A metric that was chosen is logged by nothing."""


@dataclass(frozen=True, eq=False)
class _Watch:
    """Something that reads a metric.

    Args:
        key: what to change in the configuration.
        metric: the name of the metric.
        reader: a callback or the configuration of a scheduler, or None.
        is_default: whether nobody has chosen it.
    """

    key: str
    metric: str
    reader: Any = None
    is_default: bool = False

    @property
    def is_of_validation(self) -> bool:
        return _OF_VALIDATION.match(self.metric) is not None

    def forget(self) -> None:
        """Let the reader do without the metric, where it would fail."""
        if isinstance(self.reader, ModelCheckpoint):
            self.reader.save_top_k = 0
        elif self.reader is not None:
            self.reader.strict = False


class Monitors(Checkpoint):
    """Looks for each metric as soon as it must be there.

    Names such as `val/loss` must be there after the sanity check, or else the first
    validation; all others after the first epoch. If one is not, the training ends, or,
    if it is at its end anyway, the error is raised after the summary. If nobody has
    chosen the metric, there is only no best checkpoint.

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
        self._config, self._folder = config, folder
        keys = {key_of(word) for word in words}
        self._is_chosen = "metric" in keys or config.metric != DEFAULT
        self._missing: MissingMetric | None = None
        self._waits_for_validation = True
        self._has_said = False

    def look_before(self, trainer: Any, module: Any, data: Any) -> None:
        """Refuse a metric of validation where there is none, and let wait for the test.

        Raises:
            MissingMetric: such a metric was chosen.
        """
        if self._config.metric == "":
            raise MissingMetric("metric: must be a name or null, received ''.")
        self._waits_for_validation = _has_validation(trainer, module, data)
        for watch in self._watches(trainer):
            if self._is_later(watch) and watch.reader:
                why = f"{watch.metric} is known after training"
                self._do_without(trainer, watch, why)
        if self._waits_for_validation or has_own(module, "on_train_epoch_end"):
            return  # which may log it
        why = f"{type(module).__name__} has no validation"
        for watch in self._watches(trainer):
            if watch.is_of_validation and watch.is_default:
                self._do_without(trainer, watch, why)
            elif watch.is_of_validation:
                raise MissingMetric(
                    f"{watch.key}: {watch.metric} is logged by nothing, since {why} (a "
                    f"validation_step, val_dataloader and trainer.limit_val_batches "
                    f"above 0). Choose a metric of the training, such as "
                    f"{_chosen(watch.key, 'window/loss')}"
                )

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        is_trial = trainer.sanity_checking
        if not is_trial and trainer.state.fn == "fit":
            self._waits_for_validation = False
        if trainer.callback_metrics or not is_trial:  # a module may log nothing in it
            self._look(trainer, of_validation=True)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if not self._waits_for_validation:
            self._look(trainer)

    def value(self, trainer: Any, there: Mapping[str, Any]) -> float | None:
        """The metric of the run.

        Args:
            trainer: after training.
            there: all metrics, also those of a test at the end.

        Raises:
            MissingMetric: a metric that was chosen was not logged.
        """
        watch = _Watch("metric", self._config.metric or "")
        is_early = watch.is_of_validation and self._waits_for_validation
        if watch.metric and watch.metric not in there:
            if self._is_chosen and not is_early:
                self._missing = self._missing or self._error(watch, there)
            elif not self._has_said:
                rest = "it ended before its first validation"
                rest = rest if is_early else _there_are(there, watch)
                why = f"{watch.metric} was not logged, so this run has no metric"
                print(f"trainkit | metric: {why}; {rest}")
        if self._missing is not None:
            raise self._missing
        return float(there[watch.metric]) if watch.metric in there else None

    def _look(self, trainer: Any, *, of_validation: bool = False) -> None:
        there = trainer.callback_metrics
        for watch in self._watches(trainer):
            is_other = of_validation and not watch.is_of_validation
            if watch.metric in there or is_other or self._is_later(watch):
                continue
            if watch.is_default:
                why = f"{watch.metric} is logged by nothing; {_there_are(there, watch)}"
                self._do_without(trainer, watch, why)
                continue
            steps = 0 if _is_over(trainer) else trainer.global_step
            self._missing = self._missing or self._error(watch, there, steps)
            watch.forget()
        if self._missing is not None and not _is_over(trainer):
            raise self._missing

    def _watches(self, trainer: Any) -> Iterator[_Watch]:
        metric, nodes = self._config.metric, self._config.callbacks or {}
        if metric and self._is_chosen:
            yield _Watch("metric", metric)
        for callback in trainer.callbacks:
            name = getattr(callback, "monitor", None)
            is_saver = isinstance(callback, ModelCheckpoint) and callback.save_top_k
            is_stop = isinstance(callback, EarlyStopping) and callback.strict
            if not name or not (is_saver or is_stop):
                continue
            if is_saver and name == metric:
                yield _Watch("metric", name, callback, not self._is_chosen)
                continue
            keys = [
                f"callbacks.{key}.monitor"
                for key, node in nodes.items()
                if node and node.get("monitor") == name
                if key != "best" or name != metric
            ]
            keys.append(f"monitor of {type(callback).__name__}")
            yield _Watch(keys[0], name, callback)
        for scheduler in trainer.lr_scheduler_configs:
            if scheduler.reduce_on_plateau and scheduler.monitor and scheduler.strict:
                is_ours = scheduler.monitor == self._config.scheduling.monitor
                key = "scheduling.monitor" if is_ours else "monitor of the scheduler"
                yield _Watch(key, scheduler.monitor, scheduler)

    def _is_later(self, watch: _Watch) -> bool:
        """Whether it is a metric of the test at the end."""
        return self._config.test and watch.metric.startswith("test")

    def _error(self, watch: _Watch, there: Any, steps: int = 0) -> MissingMetric:
        text = f"{watch.key}: {watch.metric} is logged by nothing; "
        text += _there_are(there, watch)
        last = self._folder.newest_checkpoint() if steps else None
        if last is not None:
            path = shlex.quote(f"ckpt_path={last}")
            text += f"\nTo continue the run with another: trainkit train {path} ..."
        return MissingMetric(text)

    def _do_without(self, trainer: Any, watch: _Watch, why: str) -> None:
        watch.forget()
        self._has_said = True
        if trainer.is_global_zero:
            say(trainer, ("best checkpoint", f"none, since {why}; last.ckpt is kept"))


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


def _there_are(there: Iterable[str], watch: _Watch) -> str:
    """The names of all metrics, and how to choose one."""
    names = sorted(name for name in there if not name.startswith("lr-"))
    names.sort(key=lambda name: not _OF_VALIDATION.match(name))
    if not names:
        return "there are none. The module logs one with self.log."
    close = [name for name in names if name.startswith(f"{watch.metric}/dataloader")]
    close += difflib.get_close_matches(watch.metric, names, n=1, cutoff=0.0)
    return f"there are: {', '.join(names)}. Choose {_chosen(watch.key, close[0])}"


def _chosen(key: str, metric: str) -> str:
    return metric if " " in key else f"{key}={metric}"
