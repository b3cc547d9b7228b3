"""A run of `trainkit fit`, from the configuration that it has saved."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError

from trainkit.cli.evaluate.evaluation import Evaluation
from trainkit.cli.evaluate.place import Place
from trainkit.cli.evaluate.trainers import prepare, put_on_one_device
from trainkit.cli.fit.cli import TrainkitCLI
from trainkit.config.redact import REDACTED
from trainkit.errors import TrainkitError
from trainkit.lit._compat import replaced

_OF_FIT = ("ckpt_path", "weights_only")
"""Arguments of `fit` itself, which an evaluation does not have."""


def make(verb: str, place: Place, words: Sequence[str]) -> Evaluation:
    """Read the run's configuration again, with other options, and build it.

    Raises:
        TrainkitError: a wrong option, or what the configuration names is not there.
    """
    assert place.config is not None
    given = _keys(verb, words)
    config: dict[str, Any] = yaml.safe_load(place.config.read_text())
    for name in _OF_FIT:
        config.pop(name, None)
    _refuse_own_script(verb, config, place.config)
    config["trainer"]["logger"] = False
    config = _without_secrets(config, given)
    trainer = config["trainer"]
    if "trainer.profiler" not in given:
        trainer["profiler"] = None
    put_on_one_device(verb, trainer, given)
    with tempfile.TemporaryDirectory(prefix="trainkit-") as folder:
        path = Path(folder, "config.yaml")
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        cli = _cli(verb, [f"--config={path}", *words])
    prepare(cli.trainer, place.folder)
    return Evaluation(
        verb,
        cli.trainer,
        cli.model,
        cli.datamodule,
        place.checkpoint,
        place.folder,
        words,
    )


def _cli(verb: str, words: Sequence[str]) -> Any:
    try:
        # Given as arguments, Lightning warns that they are not the process's own.
        with replaced(sys, argv=["trainkit", *words]):
            return TrainkitCLI(
                run=False,
                save_config_callback=None,
                parser_kwargs={"prog": f"trainkit {verb}", "exit_on_error": False},
            )
    except ArgumentError as error:
        raise TrainkitError(str(error)) from error


def _keys(verb: str, words: Sequence[str]) -> set[str]:
    keys = set()
    is_value = False
    for word in words:
        name, equals, _ = word.partition("=")
        if name.startswith("--"):
            keys.add(name[2:])
            is_value = not equals
        elif not is_value:
            raise TrainkitError(
                f"trainkit {verb}: a run of trainkit fit takes options of the Lightning"
                f" CLI, which begin with --, received {word!r}. For example: "
                f"--data.batch_size=4"
            )
        else:
            is_value = False
    if "ckpt_path" in keys:
        raise TrainkitError(
            f"--ckpt_path: is the first word here. For another checkpoint: trainkit "
            f"{verb} RUN/checkpoints/last.ckpt"
        )
    return keys


def _refuse_own_script(verb: str, config: Mapping[str, Any], path: Path) -> None:
    model = config.get("model")
    if not isinstance(model, Mapping) or "class_path" not in model:
        raise TrainkitError(
            f"model: must have its class_path in {path}, and has none, as in a run of "
            f"a script with a CLI of its own. Use the script: python train.py {verb} "
            f"--config={path} --ckpt_path=..."
        )


def _without_secrets(config: Any, given: set[str], key: str = "") -> Any:
    """The configuration without the redacted values that are given again."""
    if isinstance(config, list):
        return [_without_secrets(each, given, key) for each in config]
    if not isinstance(config, Mapping):
        return config
    kept = {}
    for name, value in config.items():
        inner = f"{key}.{name}" if key else str(name)
        inner = inner.replace(".init_args.", ".")
        if not (isinstance(value, str) and REDACTED in value):
            kept[name] = _without_secrets(value, given, inner)
        elif inner not in given:
            raise TrainkitError(
                f"--{inner}: is a secret, so its value was not saved in the run's "
                f"folder. Give it again on the command line: --{inner}=..."
            )
    return kept
