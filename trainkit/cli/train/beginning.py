"""What is written when a run begins, and what is said of one that cannot go on."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback

from trainkit.cli.runs.folder import RunFolder
from trainkit.errors import TrainkitError


class Beginning(Callback):
    """Writes `config.yaml` and `overrides.yaml`.

    In a new folder at once. In that of a run which goes on only when its training
    does: a checkpoint that does not fit, or no step left to make, leaves the folder as
    it was, and the next `ckpt_path=last` does not inherit what could not be done.

    Args:
        folder: of the run.
        config: the resolved configuration.
        words: the command line.
    """

    def __init__(
        self, folder: RunFolder, config: Mapping[str, Any], words: Sequence[str]
    ) -> None:
        self.folder, self.config, self.words = folder, config, words
        self._earlier = folder.started() if folder.is_of_a_run() else None

    @property
    def has_come(self) -> bool:
        """Also for a process that trains nothing itself, where others do."""
        return self._earlier is None or self.folder.started() != self._earlier

    def write_if_new(self) -> None:
        if self._earlier is None:
            self.folder.write_start(self.config, self.words)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        _refuse_other_optimizers(trainer)
        if self._earlier is not None and trainer.is_global_zero:
            self.folder.write_start(self.config, self.words)


def _refuse_other_optimizers(trainer: Any) -> None:
    """torch takes the state of any optimizer of as many parameters, and breaks down at
    the first step."""
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            missing = [name for name in optimizer.defaults if name not in group]
            if missing:
                raise TrainkitError(
                    f"optimizer: must be that of the checkpoint, received "
                    f"{type(optimizer).__name__}, for which it has no {missing[0]!r}. "
                    f"Take back the change, or start a run of its own by leaving "
                    f"ckpt_path out."
                )


def was_restoring(error: BaseException) -> bool:
    """Whether it was raised while Lightning read a checkpoint."""
    return any(
        frame.f_globals.get("__name__", "").endswith(".checkpoint_connector")
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def does_not_fit(path: str, error: BaseException) -> TrainkitError:
    """In place of what torch says, which may be a line for each tensor."""
    first, *more = [line.strip() for line in str(error).splitlines()] or ["?"]
    shown = " ".join([first, *more[:1]])
    shown += f" (and {len(more) - 1} more)" if len(more) > 1 else ""
    return TrainkitError(
        f"ckpt_path: {path} is not of this configuration, or no checkpoint: {shown}\n"
        f"Take back what was changed since (config.yaml beside its folder says what it "
        f"was), or leave ckpt_path out to start a run of its own."
    )
