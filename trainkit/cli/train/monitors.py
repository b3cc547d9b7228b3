"""Looks for the metrics that a run monitors, and says which there are."""

from __future__ import annotations

import difflib
import re
import shlex
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ModelCheckpoint
from omegaconf import DictConfig

from trainkit.cli.errors import MissingMetric
from trainkit.cli.runs.folder import RunFolder
from trainkit.cli.words import key_of
from trainkit.lit._compat import has_own
from trainkit.lit.callback.base import find_callback
from trainkit.lit.callback.table import say
from trainkit.lit.logs.monitor import WindowMonitor
from trainkit.lit.resume.between_steps import ends_epoch

DEFAULT = "val/loss"
"""The metric of a run for which none was chosen."""
_OF_VALIDATION = re.compile(r"(val|valid|validation)([/_]|$)")
_HOOKS = ("on_train_batch_end", "on_train_epoch_end", "on_validation_end")


@dataclass(eq=False)
class _Watch:
    """Something that reads a metric.

    Attributes:
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


class Monitors(Checkpoint):
    """Looks for each metric as soon as it must be there.

    Names such as `val/loss` must be there after the sanity check, or else the first
    validation; all others after the first epoch. If one is not, the training ends, or,
    if it is at its end anyway, the error is raised after the summary. If nobody has
    chosen the metric, only its callback goes.

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
        self._dropped: list[_Watch] = []
        self._has_validation = self._has_windows = True
        self._has_validated = False

    # ---- before training -------------------------------------------------------------

    def look_before(self, trainer: Any, module: Any, data: Any) -> None:
        """Refuse a metric of windows or of validation where there is none of these.

        Raises:
            MissingMetric: such a metric was chosen.
        """
        if self._config.metric == "":
            raise MissingMetric("metric: must be a name or null, received ''.")
        self._has_windows = find_callback(trainer, WindowMonitor) is not None
        for watch in list(self._watches(trainer)):
            if self._is_later(watch) and watch.key == "metric":
                self._drop(trainer, watch)
            if watch.metric.startswith("window/") and not self._has_windows:
                raise MissingMetric(
                    f"{watch.key}: {watch.metric} is logged by nothing, since "
                    f"WindowMonitor is not there, or has no windows. Keep "
                    f"callbacks.monitor, and choose accumulation=per_sample or another."
                )
        self._has_validation = _has_validation(trainer, module, data)
        self._refuse_validation(trainer, module)

    def _refuse_validation(self, trainer: Any, module: Any) -> None:
        if self._has_validation or has_own(module, "on_train_epoch_end"):
            return  # which may log it
        for watch in list(self._watches(trainer)):
            if not watch.is_of_validation:
                continue
            if not watch.is_default:
                other = "window/loss" if self._has_windows else "train/loss"
                raise MissingMetric(
                    f"{watch.key}: {watch.metric} is logged by nothing, since "
                    f"{type(module).__name__} has no validation (a validation_step, "
                    f"val_dataloader and trainer.limit_val_batches above 0). Choose a "
                    f"metric of the training, such as {_chosen(watch.key, other)}"
                )
            self._drop(trainer, watch)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._refuse_validation(trainer, pl_module)  # now there are schedulers
        if any(self._is_later(watch) for watch in self._dropped):
            self._say(trainer, f"{self._config.metric} is known after training")
        elif self._dropped and not self._has_validation:
            self._say(trainer, f"{type(pl_module).__name__} has no validation")

    # ---- while it trains -------------------------------------------------------------

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        there = trainer.callback_metrics
        if trainer.sanity_checking:
            if not there:
                return  # a module may log nothing in the sanity check
        elif trainer.state.fn == "fit":
            self._has_validated = True
        self._look(trainer, [w for w in self._watches(trainer) if w.is_of_validation])

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self._knows_validation:
            self._look(trainer, self._watches(trainer))

    def _look(self, trainer: Any, watches: Iterable[_Watch]) -> None:
        there = trainer.callback_metrics
        for watch in list(watches):
            if watch.metric in there or self._is_later(watch):
                continue
            if watch.is_default:
                self._drop(trainer, watch)
                why = f"{watch.metric} is logged by nothing"
                self._say(trainer, f"{why}; {_there_are(there, watch)}")
            elif not _is_over(trainer):
                raise self._error(watch, there, trainer.global_step)
            else:
                self._missing = self._missing or self._error(watch, there)
                self._drop(trainer, watch)

    def explained(self, trainer: Any, error: BaseException) -> MissingMetric | None:
        """The error for one of Lightning's, if it says that a metric is missing."""
        if isinstance(error, MissingMetric):
            return error
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        raised_by = frames[-1].f_globals.get("__name__", "") if frames else ""
        if not raised_by.startswith(("lightning.pytorch.", "pytorch_lightning.")):
            return None
        there = trainer.callback_metrics
        for watch in self._watches(trainer):
            if watch.metric not in there and watch.metric in str(error):
                return self._error(watch, there, trainer.global_step)
        return None

    # ---- after it --------------------------------------------------------------------

    def value(self, trainer: Any, there: Mapping[str, Any]) -> float | None:
        """The metric of the run.

        Args:
            trainer: after training.
            there: all metrics, also those of a test at the end.

        Raises:
            MissingMetric: a metric that was chosen was not logged.
        """
        for watch in self._watches(trainer):
            may_come = watch.is_of_validation and not self._knows_validation
            if watch.metric not in there and not watch.is_default and not may_come:
                self._missing = self._missing or self._error(watch, there)
        if self._missing is not None:
            raise self._missing
        name = self._config.metric
        if not name:
            return None
        if name not in there:
            if not self._dropped:  # or else it has been said
                why = f"{name} was not logged, so this run has no metric"
                rest = _there_are(there, _Watch("metric", name))
                if not self._knows_validation:
                    rest = "it ended before its first validation"
                print(f"trainkit | metric: {why}; {rest}")
            return None
        return float(there[name])

    # ---- parts -----------------------------------------------------------------------

    def _is_later(self, watch: _Watch) -> bool:
        """Whether it is a metric of the test at the end."""
        return self._config.test and watch.metric.startswith("test")

    @property
    def _knows_validation(self) -> bool:
        return self._has_validated or not self._has_validation

    def _watches(self, trainer: Any) -> Iterator[_Watch]:
        metric = self._config.metric
        if metric and self._is_chosen:
            yield _Watch("metric", metric)
        for callback in trainer.callbacks:
            if isinstance(callback, EarlyStopping | ModelCheckpoint):
                if callback.monitor and getattr(callback, "strict", True):
                    yield self._of_callback(callback)
        for scheduler in trainer.lr_scheduler_configs:
            if scheduler.reduce_on_plateau and scheduler.monitor and scheduler.strict:
                is_ours = scheduler.monitor == self._config.scheduling.monitor
                key = "scheduling.monitor" if is_ours else "monitor of the scheduler"
                yield _Watch(key, scheduler.monitor, scheduler)

    def _of_callback(self, callback: Any) -> _Watch:
        name: str = callback.monitor
        is_metric = name == self._config.metric
        nodes = self._config.callbacks or {}
        for key, node in nodes.items():
            if node and node.get("monitor") == name:
                target = str(node.get("_target_")).rpartition(".")[2]
                if target == type(callback).__name__:
                    is_best = key == "best" and is_metric
                    shown = "metric" if is_best else f"callbacks.{key}.monitor"
                    default = is_best and not self._is_chosen
                    return _Watch(shown, name, callback, default)
        return _Watch(f"monitor of {type(callback).__name__}", name, callback)

    def _error(self, watch: _Watch, there: Any, steps: int = 0) -> MissingMetric:
        text = f"{watch.key}: {watch.metric} is logged by nothing; "
        text += _there_are(there, watch)
        last = self._folder.newest_checkpoint() if steps else None
        if last is not None:
            path = shlex.quote(f"ckpt_path={last}")
            text += f"\nTo continue the run with another: trainkit train {path} ..."
        return MissingMetric(text)

    def _drop(self, trainer: Any, watch: _Watch) -> None:
        """Let a reader read no more; without its metric it would fail."""
        if watch.reader is None:
            return
        if hasattr(watch.reader, "reduce_on_plateau"):
            watch.reader.strict = False
            return
        self._dropped.append(watch)
        trainer.callbacks = [c for c in trainer.callbacks if c is not watch.reader]
        for hook in _HOOKS:  # Lightning may be walking through the old list
            setattr(watch.reader, hook, _nothing)

    def _say(self, trainer: Any, why: str) -> None:
        if trainer.is_global_zero:
            say(trainer, ("best checkpoint", f"none, since {why}; last.ckpt is kept"))


def _nothing(*args: Any, **kwargs: Any) -> None:
    """In place of a hook."""


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
    names = [name for name in there if not name.startswith("lr-")]
    names.sort(key=lambda n: (not _OF_VALIDATION.match(n), "loss" not in n, n))
    if not names:
        return "there are none. The module logs one with self.log."
    close = [name for name in names if name.startswith(f"{watch.metric}/dataloader")]
    close += difflib.get_close_matches(watch.metric, names, n=1, cutoff=0.5) or names
    return f"there are: {', '.join(names)}. Choose {_chosen(watch.key, close[0])}"


def _chosen(key: str, metric: str) -> str:
    return metric if " " in key else f"{key}={metric}"
