"""A run's Trainer, module and data, made again from its configuration."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.callbacks import Checkpoint, ProgressBar, TQDMProgressBar
from lightning.pytorch.loggers.logger import DummyLogger

from trainkit.cli.runs.checkpoint import Place
from trainkit.cli.words import key_of
from trainkit.config.build import Training
from trainkit.config.redact import REDACTED
from trainkit.errors import TrainkitError
from trainkit.lit.resume.graceful_stop import GracefulStop

_ONE_DEVICE = {"devices": 1, "num_nodes": 1, "strategy": "auto"}
"""What makes an evaluation exact: of several ranks the last may get padded rows."""


def configured(verb: str, place: Place, words: Sequence[str]) -> Training:
    """Make what the run has trained with; the Trainer writes nothing.

    Args:
        verb: of the command.
        place: the run.
        words: what the command line changes.

    Raises:
        TrainkitError: a wrong word, or what the configuration names is not there.
    """
    make = _of_train if place.config is None else _of_fit
    training = make(verb, place, words)
    trainer: Any = training.trainer
    trainer.loggers = [_NoLogger(place.folder.path)]
    unused = (Checkpoint, ProgressBar)
    kept = [each for each in trainer.callbacks if not isinstance(each, unused)]
    has_bar = trainer.progress_bar_callback is not None and sys.stdout.isatty()
    bar = [TQDMProgressBar()] if has_bar else []
    trainer.callbacks = [*kept, *bar, GracefulStop()]
    return training


def _of_train(verb: str, place: Place, words: Sequence[str]) -> Training:
    from omegaconf import open_dict

    from trainkit.cli.runs.resume import words_of_run
    from trainkit.cli.training_words import composed
    from trainkit.cli.words import options_first
    from trainkit.config.build import build

    given = options_first(words)
    for word in given:
        is_other = "=" not in word and not word.startswith("~")
        if is_other or key_of(word) == "ckpt_path":
            raise TrainkitError(
                f"trainkit {verb}: after the run stand overrides of trainkit train, "
                f"key=value without dashes, received {word!r}. The checkpoint is the "
                f"first word: trainkit {verb} RUN/checkpoints/last.ckpt"
            )
    own = words_of_run(place.folder, given, but="logger")
    config = composed(own, place.folder.path)
    with open_dict(config):
        config.logger = config.ckpt_path = None
        _adapt(verb, config.trainer, {key_of(word) for word in given})
    return build(config)


def _of_fit(verb: str, place: Place, words: Sequence[str]) -> Training:
    from trainkit.cli.fit.cli import without_running

    assert place.config is not None
    given = {word[2:].partition("=")[0] for word in words if word.startswith("--")}
    config: dict[str, Any] = yaml.safe_load(place.config.read_text())
    for name in ("ckpt_path", "weights_only"):  # of `fit` itself
        config.pop(name, None)
    config["trainer"]["logger"] = False
    config = _without_secrets(config, given)
    _adapt(verb, config["trainer"], given)
    with tempfile.TemporaryDirectory(prefix="trainkit-") as folder:
        path = Path(folder, "config.yaml")
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        cli = without_running(f"trainkit {verb}", [f"--config={path}", *words])
    return Training(cli.trainer, cli.model, cli.datamodule)


def _adapt(verb: str, trainer: Any, given: Collection[str]) -> None:
    """Change the configuration of a Trainer, but for what the words say.

    It gets one device, and no profiler, which would write to the run's folder.
    """
    if "trainer.profiler" not in given:
        trainer["profiler"] = None
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
    for name, value in _ONE_DEVICE.items():
        trainer[name] = value


def _without_secrets(config: Any, given: Collection[str], key: str = "") -> Any:
    """The configuration without the redacted values that are given again."""
    if isinstance(config, list):
        return [_without_secrets(each, given, key) for each in config]
    if not isinstance(config, Mapping):
        return config
    kept = {}
    for name, value in config.items():
        inner = f"{key}.{name}".lstrip(".").replace(".init_args.", ".")
        if not (isinstance(value, str) and REDACTED in value):
            kept[name] = _without_secrets(value, given, inner)
        elif inner not in given:
            raise TrainkitError(
                f"--{inner}: is a secret, so its value was not saved in the run's "
                f"folder. Give it again on the command line: --{inner}=..."
            )
    return kept


class _NoLogger(DummyLogger):
    """Logs nothing; a module may still ask it for the folder of the run."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = str(folder)

    @property
    def save_dir(self) -> str:
        return self.folder
