"""What a run does when it begins, and when it ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Callback

from trainkit.cli.runs.folder import RunFolder
from trainkit.cli.runs.screen_log import ScreenLog
from trainkit.lit.resume.graceful_stop import SIGNALS, FirstSignal


class Beginning(Callback):
    """Writes `config.yaml` and `overrides.yaml`, and opens `train.log`.

    A new folder gets them at once. A resumed run's folder gets them only when training
    starts: if the checkpoint does not fit, or no step is left, the folder stays as it
    was, and the next `ckpt_path=last` does not inherit the failed attempt.

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
        self._earlier = folder.started() if folder.is_of_a_run() else None

    @property
    def is_written(self) -> bool:
        """Whether this process or another rank has written the files."""
        return self._earlier is None or self.folder.started() != self._earlier

    def write_if_new(self) -> None:
        if self._earlier is None:
            self._write()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.has_trained = True
        if self._earlier is not None and trainer.is_global_zero:
            self._write()

    def _write(self) -> None:
        self.folder.write_start(self.config, self.words)
        self.screen.open(self.folder.log)


class Ending(Callback):
    """Handles the signals that ask a run to stop after training.

    Lightning restores the signal handlers before it closes the loggers, which may
    upload for a long time. A SIGTERM would then end the process before the summary is
    written. This callback must be the first in the list.

    Attributes:
        is_over: whether training has ended by itself.
        signals: the first signal after training, once they are listened to.
    """

    def __init__(self) -> None:
        self.is_over = False
        self.signals = FirstSignal(
            "training is over, writing the summary",
            on_ctrl_c="Ctrl+C again quits at once",
        )

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
