"""The files that a run writes when it begins, and refusals to resume."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback

from trainkit.cli.runs.folder import RunFolder
from trainkit.cli.runs.screen_log import ScreenLog
from trainkit.errors import TrainkitError


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
        _refuse_other_optimizers(trainer)
        self.has_trained = True
        if self._earlier is not None and trainer.is_global_zero:
            self._write()

    def _write(self) -> None:
        self.folder.write_start(self.config, self.words)
        self.screen.open(self.folder.log)


def _refuse_other_optimizers(trainer: Any) -> None:
    """Refuse an optimizer whose checkpoint lacks some of its options.

    torch loads the state of any optimizer that has as many parameters, and then fails
    at the first step.
    """
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            missing = [name for name in optimizer.defaults if name not in group]
            if missing:
                raise TrainkitError(
                    f"optimizer: must be of the type that the checkpoint was written "
                    f"with, received {type(optimizer).__name__}; the checkpoint has no "
                    f"{missing[0]!r} for it. Undo the change, or leave ckpt_path out "
                    f"to start a new run."
                )
