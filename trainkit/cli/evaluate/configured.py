"""A run's Trainer, module and data, made again from its configuration."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import Any

from lightning.pytorch.callbacks import Checkpoint, ProgressBar, TQDMProgressBar
from lightning.pytorch.loggers.logger import DummyLogger
from omegaconf import open_dict

from trainkit.cli.runs.folder import RunFolder
from trainkit.cli.runs.resume import words_of_run
from trainkit.cli.training_words import composed
from trainkit.cli.words import key_of, options_first
from trainkit.config.build import Training, build
from trainkit.errors import TrainkitError
from trainkit.lit.resume.graceful_stop import GracefulStop

_ONE_DEVICE = {"devices": 1, "num_nodes": 1, "strategy": "auto"}
"""What makes an evaluation exact: of several ranks the last may get padded rows."""


def configured(verb: str, folder: RunFolder, words: Sequence[str]) -> Training:
    """Make what the run has trained with; the Trainer writes nothing.

    Args:
        verb: of the command.
        folder: of the run.
        words: what the command line changes.

    Raises:
        TrainkitError: a wrong word, or what the configuration names is not there.
    """
    given = options_first(words)
    for word in given:
        is_other = "=" not in word and not word.startswith("~")
        if is_other or key_of(word) == "ckpt_path":
            raise TrainkitError(
                f"trainkit {verb}: after the run stand overrides of trainkit train, "
                f"key=value without dashes, received {word!r}. The checkpoint is the "
                f"first word: trainkit {verb} RUN/checkpoints/last.ckpt"
            )
    own = words_of_run(folder, given, but="logger")
    config = composed(own, folder.path)
    with open_dict(config):
        config.logger = config.ckpt_path = None
        _adapt(verb, config.trainer, {key_of(word) for word in given})
    training = build(config)
    trainer: Any = training.trainer
    trainer.loggers = [_NoLogger(folder)]
    unused = (Checkpoint, ProgressBar)
    kept = [each for each in trainer.callbacks if not isinstance(each, unused)]
    has_bar = trainer.progress_bar_callback is not None and sys.stdout.isatty()
    bar = [TQDMProgressBar()] if has_bar else []
    trainer.callbacks = [*kept, *bar, GracefulStop()]
    return training


def _adapt(verb: str, trainer: Any, given: Collection[str]) -> None:
    """Change the configuration of a Trainer, but for what the words say.

    It gets one device, and no profiler, which would write to the run's folder.
    """
    if "trainer.profiler" not in given:
        trainer.profiler = None
    if any(f"trainer.{name}" in given for name in _ONE_DEVICE):
        return
    had = [
        f"trainer.{name}={trainer[name]}"
        for name in ("devices", "num_nodes")
        if trainer.get(name, 1) not in (1, "1", "auto", [0])
    ]
    if had:
        print(
            f"trainkit | {verb}: on one device, which gives each row once; the run had "
            f"{' and '.join(had)}",
            flush=True,
        )
    trainer.update(_ONE_DEVICE)


class _NoLogger(DummyLogger):
    """Logs nothing; a module may still ask it for the folder of the run."""

    def __init__(self, folder: RunFolder) -> None:
        super().__init__()
        self.folder = folder

    @property
    def save_dir(self) -> str:
        return str(self.folder.path)
