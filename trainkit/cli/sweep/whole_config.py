"""The arguments that a sweep has set, separated from what runs have logged.

An agent, and a sweep without a server, write a trial's arguments to a file, with their
types. When an agent resumes a trial, after a preemption, it hands over the run's whole
configuration instead: each top-level entry that was ever logged
(https://github.com/wandb/wandb/issues/9143, and `_wandb`:
https://github.com/wandb/wandb/issues/4237). A run of a sweep therefore logs all it has
in one entry, and what stands beside that is the sweep's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainkit.cli.words import quoted

PARAMETERS = "WANDB_SWEEP_PARAM_PATH"
"""The environment variable with the path of the file of arguments."""

LOGGED = "trainkit"
"""The entry of what a run has logged."""


def as_logged(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration as a run logs it: under a sweep in one entry."""
    return {LOGGED: config} if PARAMETERS in os.environ else config


def for_train(argv: list[str]) -> list[str]:
    """The words after `trainkit train`, as Hydra reads them.

    Of those that an agent has made, what was logged is dropped, and a value changes
    from Python's notation to Hydra's (`None` to `null`). So a resumed trial has the
    arguments with which it was started. Words of the sweep's own `command` stay.
    """
    given, kept = _given(), []
    for word in argv:
        name, _, text = word.partition("=")
        key = name.lstrip("+")
        value = given.get(key)
        # An agent may list a dictionary in another order.
        is_dictionary = isinstance(value, Mapping) and text.startswith("{")
        if key not in given or not (is_dictionary or text == str(value)):
            kept.append(word)
        elif key not in (LOGGED, "_wandb"):
            kept.append(f"{name}={hydra_text(value)}")
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
