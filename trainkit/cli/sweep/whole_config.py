"""The arguments that a sweep has set, separated from what runs have logged.

An agent, and a sweep without a server, write a trial's arguments to a file, with their
types. When an agent resumes a trial, after a preemption, it hands over the run's whole
configuration instead: each top-level entry that was ever logged, with dictionaries in
Python's notation (https://github.com/wandb/wandb/issues/9143, and `_wandb`:
https://github.com/wandb/wandb/issues/4237).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainkit.cli.words import quoted

PARAMETERS = "WANDB_SWEEP_PARAM_PATH"
"""The environment variable with the path of the file of arguments."""

_OWN = ("hydra", "paths", "ckpt_path")
"""Keys of a run's folders and checkpoint, which are new in a resumed run."""


def for_train(argv: list[str]) -> list[str]:
    """The words after `trainkit train`, without an agent's that are not overrides.

    Words of the sweep's own `command` stay. Of those that the agent has made:

    - One is dropped if the configuration does not have its key (a logged fact), if its
      key is `hydra`, `paths` or `ckpt_path`, or if it chooses None of a group.
    - A dictionary with a `_target_` inside is a section that was logged, and is
      dropped. Another dictionary is a nested parameter, and becomes dotted overrides.
    - A value changes from Python's notation to Hydra's (`None` to `null`).

    So a resumed trial has the arguments with which it was started.
    """
    given = _given()
    if not given:
        return argv
    from omegaconf import OmegaConf

    from trainkit.cli.composition import Composition
    from trainkit.config.targets import targets_of

    fixed = [word for word in argv if not _is_given(word, given)]
    texts = {key for key, v in given.items() if v is None or isinstance(v, str)}
    options = Composition(fixed).options
    groups = {key: options(key) for key in texts if options(key)}
    chosen = [f"{key}={given[key]}" for key in groups if given[key] in groups[key]]
    config = Composition([*fixed, *chosen]).config
    known = {*_keys(OmegaConf.to_container(config, resolve=False)), *groups}
    is_swept = "WANDB_SWEEP_ID" not in os.environ  # nothing logged, without a server
    kept: list[str] = []
    for word in argv:
        if word in fixed:
            kept.append(word)
            continue
        name = word.partition("=")[0]
        key = name.lstrip("+")
        value = given[key]
        is_own = key.partition(".")[0] in _OWN or (value is None and key in groups)
        if is_own or any(True for _ in targets_of(value)):
            continue
        kept += [
            f"{name.removesuffix(key)}{dotted}={hydra_text(each)}"
            for dotted, each in flatten({key: value}).items()
            if is_swept or dotted in known
        ]
    return kept


def flatten(arguments: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Arguments by dotted name.

    >>> flatten({"a": 1, "b": {"c": {"d": 2}}})
    {'a': 1, 'b.c.d': 2}
    """
    flat = {}
    for name, value in arguments.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def without_swept(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without the top-level entries that the sweep has set.

    W&B locks these, and warns "locked by 'sweep'" if one is logged again.
    """
    given = _given()
    return {key: value for key, value in config.items() if key not in given}


def write_parameters(arguments: Mapping[str, Any], folder: Path) -> Path:
    """Write a trial's arguments to a file for W&B's client, as an agent does."""
    import yaml

    entries = {name: {"value": value} for name, value in arguments.items()}
    path = folder / "arguments.yaml"
    path.write_text(yaml.safe_dump({"wandb_version": 1, **entries}), encoding="utf-8")
    return path


def _given() -> dict[str, Any]:
    """The arguments in the agent's file; none without a file."""
    import yaml

    path = Path(os.environ.get(PARAMETERS, ""))
    entries = yaml.safe_load(path.read_text("utf-8")) if path.is_file() else {}
    return {
        str(key): entry["value"]
        for key, entry in entries.items()
        if isinstance(entry, Mapping) and "value" in entry
    }


def _is_given(word: str, given: Mapping[str, Any]) -> bool:
    """Whether the agent made the word. It may list a dictionary in another order."""
    key, _, text = word.lstrip("+").partition("=")
    is_dictionary = isinstance(given.get(key), Mapping) and text.startswith("{")
    return key in given and (is_dictionary or str(given[key]) == text)


def _keys(section: Any, prefix: str = "") -> list[str]:
    """The dotted names of all values and sections of a configuration."""
    found = []
    for name, value in section.items():
        inner = _keys(value, f"{prefix}{name}.") if isinstance(value, Mapping) else []
        found += [f"{prefix}{name}", *inner]
    return found


def hydra_text(value: Any) -> str:
    """A value in the notation of Hydra's overrides.

    >>> hydra_text(1e-05), hydra_text(None), hydra_text(["1.0", {"k": True}])
    ('1e-05', 'null', "['1.0',{k:True}]")
    """
    if value is None:
        return "null"
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, Mapping):
        pairs = (f"{key}:{hydra_text(each)}" for key, each in value.items())
        return "{" + ",".join(pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(hydra_text, value)) + "]"
    return str(value)
