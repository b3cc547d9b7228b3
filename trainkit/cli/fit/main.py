"""`trainkit fit | validate | test | predict`: the Lightning CLI as a sub-command."""

from __future__ import annotations

import re
import sys
from itertools import chain, count
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.utilities.exceptions import SIGTERMException

from trainkit.cli.door import spoken
from trainkit.cli.errors import TrainingFailed, is_mistake
from trainkit.cli.fit.cli import TrainkitCLI
from trainkit.cli.words import find_modules_here, to_paste
from trainkit.config.redact import redact_file
from trainkit.errors import TrainkitError
from trainkit.lit.callback.base import find_callback
from trainkit.lit.front.exact_resume import ExactResume, add_exact_resume

_FOUND_BY_LIGHTNING = re.compile(r"(best|last|hpc)$|registry\b|\w+:/")
"""Values of `--ckpt_path` that are no path: a word that Lightning knows, or a URL."""


class RedactedConfig(SaveConfigCallback):
    """Saves the configuration of a `fit` in its folder, without secrets.

    If the folder has a file of that name, from an earlier run or given with `--config`,
    it stays as it is and `config-v1.yaml` is written.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" or self.already_saved:
            return
        folder = trainer.log_dir  # a collective call: every rank must make it
        path = _unused(Path(folder or ".", self.config_filename))
        self.config_filename = path.name
        super().setup(trainer, pl_module, stage)
        if trainer.is_global_zero and path.is_file():
            redact_file(path)


def main(argv: list[str]) -> int:
    """Run one of the four sub-commands.

    Args:
        argv: the sub-command's name, then its arguments.

    Returns:
        the exit status: 0, or 130 and 143 after SIGINT and SIGTERM.

    Raises:
        TrainkitError: a mistake in the arguments or the configuration.
        TrainingFailed: training had begun, and then ended with an error.
    """
    find_modules_here()
    trainers: list[Trainer] = []

    class Command(TrainkitCLI):
        def before_instantiate_classes(self) -> None:
            _refuse_absent(self.config[str(self.subcommand)].get("ckpt_path"))

        def instantiate_trainer(self, **kwargs: Any) -> Trainer:
            trainer: Any = super().instantiate_trainer(**kwargs)
            # If there is no `ModelCheckpoint`, Lightning has already added its own.
            trainer.callbacks = add_exact_resume(trainer.callbacks)
            trainers.append(trainer)
            return trainer

    # Lightning warns if it gets arguments that are not the process's own.
    words = None if argv == sys.argv[1:] else argv
    try:
        with spoken("fit"):
            Command(
                args=words,
                save_config_callback=RedactedConfig,
                parser_kwargs={"prog": "trainkit", "exit_on_error": False},
            )
    except ArgumentError as error:
        raise TrainkitError(str(error)) from error
    except Exception as error:
        had_begun = bool(trainers) and trainers[0].global_step > 0
        if had_begun and is_mistake(error):  # a refusal during training
            raise TrainingFailed.by(error) from error
        raise
    except SystemExit as end:
        return _status(end, trainers, argv)
    return 0


def _refuse_absent(ckpt_path: Any) -> None:
    if ckpt_path is None or _FOUND_BY_LIGHTNING.match(str(ckpt_path)):
        return
    if not Path(ckpt_path).expanduser().exists():
        raise TrainkitError(
            f"ckpt_path: must be a checkpoint, a URL of one, or last, best or hpc, "
            f"received {str(ckpt_path)!r}, which does not exist. Leave it out to start "
            f"a new run."
        )


def _unused(path: Path) -> Path:
    """The path, or else the first of `-v1`, `-v2`, ... that does not exist."""
    others = (path.with_stem(f"{path.stem}-v{n}") for n in count(1))
    return next(each for each in chain([path], others) if not each.exists())


def _status(end: SystemExit, trainers: list[Trainer], argv: list[str]) -> int:
    """The exit status after an interruption, `--help` and the like."""
    status = end.code
    if isinstance(end.__context__, KeyboardInterrupt):  # Lightning exits with 1
        status = 130
    elif isinstance(end, SIGTERMException) and status is None:  # Lightning's own
        status = 143
    elif status is None:
        status = 0
    if not isinstance(status, int):
        raise end  # with a text, which Python prints
    for trainer in trainers:
        _say_how_to_resume(trainer, argv)
    return status


def _say_how_to_resume(trainer: Any, argv: list[str]) -> None:
    stop = find_callback(trainer, ExactResume)
    if stop is None or stop.stopped_by is None or not trainer.is_global_zero:
        return
    how = ""
    if stop.checkpoint_path is not None:
        line = to_paste([*argv, f"--ckpt_path={stop.checkpoint_path}"])
        how = f"; to resume{stop.caveat}: {line}"
    elif trainer.state.fn == "fit":
        savers = trainer.checkpoint_callbacks
        earlier = [getattr(each, "best_model_path", "") for each in savers]
        saved = next(filter(None, earlier), None)
        how = f"; saved earlier: {saved}" if saved else "; nothing was saved"
    print(f"trainkit | stopped by {stop.stopped_by.name}{how}", flush=True)
