"""The arguments that a sweep has set, separated from what runs have logged.

1. `wandb agent` starts a trial with the swept arguments. When it resumes a trial, after
   a preemption, it passes the run's whole configuration instead: each top-level entry
   that was ever logged, with dictionaries in Python's notation
   (https://github.com/wandb/wandb/issues/9143, and `_wandb`:
   https://github.com/wandb/wandb/issues/4237). `swept_arguments` keeps the words that a
   Hydra application can take.
2. W&B locks the entries that a sweep sets, and warns "locked by 'sweep'" if one is
   logged again. `without_swept` keeps the other entries.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainkit.cli.sweep.command import hydra_text
from trainkit.cli.sweep.parameters import flatten

SWEEP = "WANDB_SWEEP_ID"
PARAMETERS = "WANDB_SWEEP_PARAM_PATH"
"""The environment variable with the path of the agent's file of arguments."""

_OWN = ("hydra", "paths", "ckpt_path")
"""Keys of a run's folders and checkpoint, which are new in a resumed run."""


def for_train(argv: list[str]) -> list[str]:
    """The words after `trainkit train`, without those that an agent added wrongly."""
    if SWEEP not in os.environ:
        return argv
    from trainkit.cli.sweep.config_keys import ConfigKeys

    given = _given(os.environ)
    fixed = [w for w in argv if w.startswith("-") or not _is_given(w, given)]
    keys = ConfigKeys(fixed, given)
    return swept_arguments(argv, keys, is_group=lambda key: bool(keys.options(key)))


def swept_arguments(
    argv: list[str],
    known: Callable[[str], bool],
    *,
    is_group: Callable[[str], bool] = lambda key: False,
    environ: Mapping[str, str] = os.environ,
) -> list[str]:
    """The words of a command line, without the agent's words that are not overrides.

    Under `WANDB_SWEEP_ID`, the words that the agent has added change:

    - A word is dropped if the configuration does not have its key (a logged fact), or
      if its key is `hydra`, `paths` or `ckpt_path`.
    - A dictionary with a `_target_` inside is a section that was logged, and is
      dropped. Another dictionary is a nested parameter, and becomes dotted overrides.
    - A value changes from Python's notation to Hydra's (`None` to `null`). None as the
      choice of a group is dropped, because Hydra does not take it.

    A resumed trial then has the arguments with which it was started, and plain entries
    of the root (`seed=0`), whose values have not changed. Words of the sweep's own
    `command` stay as they are. Without a sweep, all words stay.

    Args:
        argv: the words after `trainkit train`.
        known: whether an override of a key would be accepted.
        is_group: whether a key is a group, whose options are files.
        environ: the environment.
    """
    if SWEEP not in environ:
        return argv
    given = _given(environ)
    kept: list[str] = []
    for word in argv:
        if "=" not in word or word.startswith("-") or not _is_given(word, given):
            kept.append(word)
            continue
        key, text = _split(word)
        prefix = word[: len(word) - len(word.lstrip("+"))]
        value = given[key] if given is not None else _read(text)
        if value is not None or not is_group(key):
            kept += [prefix + each for each in _overrides(key, value, known)]
    return kept


def without_swept(
    config: Mapping[str, Any], *, environ: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """A configuration without the top-level entries that the sweep has set."""
    given = _given(environ) or {}
    return {key: value for key, value in config.items() if key not in given}


def _split(word: str) -> tuple[str, str]:
    key, _, text = word.lstrip("+").partition("=")
    return key, text


def _is_given(word: str, given: Mapping[str, Any] | None) -> bool:
    """Whether the agent made the word; without its file, every word counts."""
    key, text = _split(word)
    if given is None or key not in given:
        return given is None
    # The keys of a dictionary are sorted in the file, but not in the word.
    return str(given[key]) == text or _read(text) == given[key]


def write_parameters(arguments: Mapping[str, Any], folder: Path) -> Path:
    """Write a trial's arguments to a file for W&B's client, as an agent does."""
    import yaml

    entries = {name: {"value": value} for name, value in arguments.items()}
    path = folder / "arguments.yaml"
    path.write_text(yaml.safe_dump({"wandb_version": 1, **entries}), encoding="utf-8")
    return path


def read_parameters(path: Path) -> dict[str, Any]:
    """The arguments in a file that an agent or `write_parameters` has written."""
    import yaml

    entries = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    return {
        str(key): entry["value"]
        for key, entry in entries.items()
        if isinstance(entry, Mapping) and "value" in entry
    }


def _given(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """The arguments in the agent's file, with their types; None without a file."""
    path = environ.get(PARAMETERS)
    return read_parameters(Path(path)) if path and Path(path).is_file() else None


def _read(text: str) -> Any:
    """A dictionary or None in Python's notation; Hydra reads any other text."""
    if not text.startswith("{") and text != "None":
        return _Text(text)
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return _Text(text)


class _Text(str):
    """Text that Hydra reads without a change."""


def _overrides(key: str, value: Any, known: Callable[[str], bool]) -> Iterator[str]:
    from trainkit.config.targets import targets_of

    if key.partition(".")[0] in _OWN or any(True for _ in targets_of(value)):
        return
    for name, each in flatten({key: value}).items():
        if known(name):
            yield f"{name}={each if isinstance(each, _Text) else hydra_text(each)}"
