"""One training of `trainkit train`, from its configuration to its summary."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.pytorch import Callback
from lightning.pytorch.profilers import PassThroughProfiler
from omegaconf import DictConfig, open_dict

from trainkit.cli.door import spoken
from trainkit.cli.errors import Interrupted, TrainingFailed, is_mistake
from trainkit.cli.evaluate.evaluation import refuse_no_test, test_best
from trainkit.cli.report.page import report_of_training
from trainkit.cli.runs import summary
from trainkit.cli.runs.checkpoint import does_not_fit, was_restoring
from trainkit.cli.runs.folder import RunFolder, only_one
from trainkit.cli.runs.ranks import make_repeatable, ranks_of_one_run
from trainkit.cli.runs.screen_log import ScreenLog
from trainkit.cli.runs.throughput import Throughput
from trainkit.cli.train.monitors import Monitors
from trainkit.cli.wandb_logger import WandbFacts
from trainkit.cli.words import of_this_job, to_paste
from trainkit.config.build import Training, build
from trainkit.config.check import refuse_other_root
from trainkit.config.redact import public_config, redact
from trainkit.errors import TrainkitError
from trainkit.lit.batch_size import longest_window
from trainkit.lit.front.exact_resume import (
    ExactResume,
    add_exact_resume,
    find_stop,
)
from trainkit.lit.logs.metrics_csv import MetricsCSVLogger
from trainkit.lit.logs.rows import OneStep
from trainkit.lit.resume.first_signal import SIGNALS, FirstSignal


class Beginning(Callback):
    """Writes `config.yaml` and `overrides.yaml`, and opens `train.log`.

    It does so when training starts. What is refused before leaves a folder as it was,
    and the next `ckpt_path=last` does not inherit the failed attempt.

    Args:
        folder: the folder of the run.
        config: the resolved configuration.
        words: the overrides of the command line.
        log: what has stood on the screen so far.

    Attributes:
        has_trained: whether training has started, on this rank and so on all.
    """

    def __init__(
        self,
        folder: RunFolder,
        config: Mapping[str, Any],
        words: Sequence[str],
        log: ScreenLog,
    ) -> None:
        self.folder, self.config, self.words, self.screen = folder, config, words, log
        self.has_trained = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.has_trained = True
        if trainer.is_global_zero:
            self.folder.write_start(self.config, self.words)
            self.screen.open(self.folder.log)


class Ending(Callback):
    """Handles the signals that ask a run to stop after training.

    Lightning restores the signal handlers before it closes the loggers, which may
    upload for a long time. A SIGTERM would then end the process before the summary is
    written. This callback must be the first in the list.

    Attributes:
        is_over: whether training has ended by itself.
        window: micro-batches of a full window at the last step; a schedule makes the
            Trainer forget them.
        signals: the first signal after training, once they are listened to.
    """

    def __init__(self) -> None:
        self.is_over = False
        self.window: int | None = None
        self.signals = FirstSignal(
            "training is over, writing the summary",
            on_ctrl_c="Ctrl+C again quits at once",
        )

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self.window = longest_window(trainer)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.signals.listen()
        self.is_over = True


@contextmanager
def signals_given_back() -> Iterator[None]:
    """Restore the signal handlers at the end."""
    before = {each: signal.getsignal(each) for each in SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for each, handler in before.items():
                signal.signal(each, handler)


def run(config: DictConfig, log: ScreenLog) -> float | None:
    """Train, write the summary and the report, and return the metric."""
    logging.getLogger("lightning").handlers.clear()  # they print beside Hydra's
    refuse_other_root(config)
    folder = RunFolder(config.paths.run_dir)
    if config.ckpt_path is None:
        _refuse_to_replace(folder)
    overrides = of_this_job()
    with open_dict(config):  # absolute: the working directory may change
        config.paths.run_dir = str(folder.path)
    training = build(
        config,
        callbacks=[OneStep(), Throughput(), WandbFacts()],
        metrics=MetricsCSVLogger(folder.path),
        trains=True,
    )
    make_repeatable(overrides, folder)
    if config.test:
        refuse_no_test(training)
    shown = public_config(config)
    beginning = Beginning(folder, shown, redact(overrides), log)
    trainer: Any = training.trainer
    # Every run can be resumed exactly, whatever callbacks are configured.
    keeps = config.trainer.get("enable_checkpointing") is not False
    place = folder.checkpoints if keeps else None
    trainer.callbacks = add_exact_resume(trainer.callbacks, place)
    ending = Ending()
    monitors = Monitors(config, overrides)
    first = [ending, monitors]
    trainer.callbacks = [*first, *trainer.callbacks, beginning]
    _keep_profile(trainer, folder)
    # Two runs would mix their rows and checkpoints in one folder.
    one = only_one(folder.path, what="paths.run_dir")
    with signals_given_back(), one if trainer.is_global_zero else nullcontext():
        for logger in trainer.loggers:
            logger.log_hyperparams(shown)
        with ranks_of_one_run(trainer):
            metrics = _fit_and_report(training, config, beginning, ending)
    stop = find_stop(trainer)
    if stop.stopped_by is not None and not ending.is_over:
        _leave(stop, folder, training.trainer.is_global_zero)
    heard = stop.heard or ending.signals.heard
    if heard and HydraConfig.get().mode is RunMode.MULTIRUN:
        raise Interrupted(heard)  # the other runs do not start
    if not beginning.has_trained:
        return None  # no step was left, and that has been said
    value = monitors.value(metrics)
    # For Optuna's sweeper None is a failed trial; NaN makes it crash.
    return None if value is None or math.isnan(value) else value


def _refuse_to_replace(folder: RunFolder) -> None:
    """Refuse to begin anew where a run has left a checkpoint: it would be lost."""
    if not folder.is_of_a_run() or not folder.newest_checkpoint():
        return
    what, remedy = "that did not finish", "ckpt_path=auto resumes it"
    if folder.read_summary().get("status") == "finished":
        what = "that has finished"
        limit = "trainer.max_steps or max_epochs"
        remedy = f"ckpt_path=auto with a larger {limit} trains it longer"
    raise TrainkitError(
        f"paths.run_dir: {folder.path} has a run {what}, and a new one would replace "
        f"its checkpoint. {remedy}. To begin anew, name another folder, or remove this "
        f"one."
    )


def _keep_profile(trainer: Any, folder: RunFolder) -> None:
    """Write the profile to a file; Lightning would print it with a silenced logger."""
    profiler = trainer.profiler
    if profiler.filename is None and not isinstance(profiler, PassThroughProfiler):
        profiler.filename = "profile"
        profiler.dirpath = profiler.dirpath or folder.path


def _fit_and_report(
    training: Training,
    config: DictConfig,
    beginning: Beginning,
    ending: Ending,
) -> dict[str, Any]:
    """Train and test, then write and show the summary, even after an error.

    Returns:
        The last metrics of both.
    """
    started = time.monotonic()
    status = "failed"
    try:
        _fit(training, config.ckpt_path, beginning)
        status = "finished"
    except SystemExit as end:  # ExactResume's, or Lightning's after a second Ctrl+C
        if ending.is_over:
            status = "finished"
            raise Interrupted(signal.SIGINT) from end
        if find_stop(training.trainer).stopped_by is None:
            raise
        status = "interrupted"
    finally:
        ending.signals.listen()
        folder = beginning.folder
        trainer = training.trainer
        facts = summary.collect(training, config, folder, ending.window)
        facts.update(status=status, seconds=round(time.monotonic() - started, 1))
        metrics = dict(trainer.callback_metrics)
        try:
            if config.test:
                facts["test"] = None
                is_over = status == "finished" and beginning.has_trained
                if is_over and not ending.signals.heard:
                    facts["test"] = test_best(training, folder)
                    metrics.update(trainer.callback_metrics)
        finally:
            _write_and_show(facts, config, beginning, trainer)
    return metrics


def _write_and_show(
    facts: dict[str, Any], config: DictConfig, beginning: Beginning, trainer: Any
) -> None:
    """Write and show the summary; of a run without a step that was left, say that."""
    if not trainer.is_global_zero:
        return
    folder, is_over = beginning.folder, facts["status"] == "finished"
    if beginning.has_trained:
        with nullcontext() if is_over else suppress(OSError):  # of a full disk
            summary.write(facts, folder)
            if config.report:
                report_of_training(folder, pictures=config.pictures)
        if facts["status"] != "failed" or facts["steps"]:
            summary.show(facts, folder)
    elif is_over:
        done = summary.counted_steps(trainer.global_step)
        print(
            f"trainkit | training: nothing to do: the run had finished after {done}; "
            f"to train longer, resume it with a larger trainer.max_steps, max_epochs "
            f"or max_time",
            flush=True,
        )


def _fit(training: Training, ckpt_path: str | None, beginning: Beginning) -> None:
    try:
        with spoken("train"):
            training.fit(ckpt_path)
        _refuse_no_batches(training.trainer)
    except Exception as error:
        if ckpt_path and was_restoring(error) and not is_mistake(error):
            raise does_not_fit("ckpt_path", ckpt_path, error) from error
        # A refusal of a later step, such as a loss of NaN, is a result of training.
        had_begun = beginning.has_trained and training.trainer.global_step > 0
        if is_mistake(error) and not had_begun:
            raise
        raise TrainingFailed.by(error) from error


def _refuse_no_batches(trainer: Any) -> None:
    """Refuse an empty loader, with which Lightning ends as if it had trained."""
    if trainer.num_training_batches == 0 and trainer.limit_train_batches:
        raise TrainkitError(
            "data: the training loader must have batches, and has none, so nothing was "
            "trained. Give it rows; with drop_last=True, as many as a batch."
        )


def _leave(stop: ExactResume, folder: RunFolder, is_first: bool) -> None:
    assert stop.stopped_by is not None
    if not is_first:  # with another status Lightning kills the first rank
        raise SystemExit(0)
    where = stop.checkpoint_path or folder.newest_checkpoint()
    how = "there is no checkpoint yet, so it cannot be resumed"
    if where is not None:
        line = to_paste(["train", f"ckpt_path={where}"])
        how = f"to resume{stop.caveat}: {line}"
    print(f"trainkit | stopped by {stop.stopped_by.name}; {how}", flush=True)
    if "WANDB_SWEEP_ID" in os.environ and stop.stopped_by is signal.SIGTERM:
        # A sweep stops a poor trial with SIGTERM. That is no failure: after three of
        # them in a row wandb's agent gives up.
        raise SystemExit(0)
    raise Interrupted(stop.stopped_by)
