"""A run of `trainkit train`, as its configuration describes it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from omegaconf import DictConfig, open_dict

from trainkit.cli.composition import Composition
from trainkit.cli.evaluate.evaluation import Evaluation
from trainkit.cli.evaluate.place import Place
from trainkit.cli.evaluate.trainers import prepare, put_on_one_device
from trainkit.cli.runs.folder import RunFolder
from trainkit.cli.train.resume import words_of_run
from trainkit.cli.words import (
    CONFIG_DIR,
    CONFIG_NAME,
    CONFIG_PATH,
    key_of,
    options_first,
)
from trainkit.config.build import build
from trainkit.config.conf import register
from trainkit.config.redact import REDACTED
from trainkit.config.targets import targets_of
from trainkit.errors import TrainkitError

_OPTIONS = (CONFIG_DIR, CONFIG_NAME, CONFIG_PATH)


def make(verb: str, place: Place, words: Sequence[str]) -> Evaluation:
    """Compose the run's configuration again, with other overrides, and build it.

    Raises:
        TrainkitError: a word that cannot be used here, or what the configuration names
            is not there.
    """
    register()
    given = options_first(words)
    _refuse_words(verb, given)
    run = place.folder
    config = Composition(options_first(words_of_run(_readable(run), given))).config
    keys = {key_of(word) for word in given}
    with open_dict(config):
        config.paths.run_dir = str(run.path)
        config.logger = config.ckpt_path = None
        if "trainer.profiler" not in keys:
            config.trainer.profiler = None
        put_on_one_device(verb, config.trainer, keys)
    _refuse_absent_modules(verb, config, run)
    training = build(config)
    prepare(training.trainer, run)
    return Evaluation(
        verb,
        training.trainer,
        training.module,
        training.data,
        place.checkpoint,
        run,
        given,
    )


class _WithoutLoggers(RunFolder):
    """A run whose loggers need not be given their secrets again."""

    def overrides(self) -> list[str]:
        return [
            word
            for word in super().overrides()
            if not (REDACTED in word and key_of(word).startswith("logger."))
        ]


def _readable(run: RunFolder) -> RunFolder:
    return _WithoutLoggers(run.path)


def _refuse_words(verb: str, words: Sequence[str]) -> None:
    for word in words:
        name = word.partition("=")[0]
        if word.startswith("-"):
            if name not in _OPTIONS:
                raise TrainkitError(
                    f"trainkit {verb} {name}: must be one of {', '.join(_OPTIONS)} "
                    f"beside a run of trainkit train, whose overrides have no dashes: "
                    f"trainer.limit_test_batches=10."
                )
        elif key_of(word) == "ckpt_path":
            raise TrainkitError(
                f"ckpt_path: is the first word here. For another checkpoint: trainkit "
                f"{verb} RUN/checkpoints/last.ckpt"
            )
        elif "=" not in word and not word.startswith("~"):
            raise TrainkitError(
                f"trainkit {verb}: after the run stand overrides (key=value), received "
                f"{word!r}. It evaluates one run at a time."
            )


def _refuse_absent_modules(verb: str, config: DictConfig, run: RunFolder) -> None:
    """Refuse a module that lies where the run was started, and not here."""
    for key, target in targets_of(config):
        package = str(target).partition(".")[0]
        if not isinstance(target, str) or _is_there(package):
            continue
        for place in run.path.parents:
            if (place / f"{package}.py").exists() or (place / package).is_dir():
                raise TrainkitError(
                    f"{key}: {target} is in {place}, where the run was started, and "
                    f"not in the current folder, {Path.cwd()}. Run the command there: "
                    f"cd {place} && trainkit {verb} {run.path.relative_to(place)}"
                )


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False
