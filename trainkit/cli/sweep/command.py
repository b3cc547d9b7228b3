"""The command line of a trial, as `wandb agent` makes it from a sweep's `command`."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.cli.sweep.parameters import flatten
from trainkit.cli.words import options_first, quoted
from trainkit.errors import TrainkitError

_DEFAULT = ("${env}", "${interpreter}", "${program}", "${args}")
"""The `command` of a file that has none."""

_HYDRA_ARGS = ("${args_no_hyphens}", "${args_override_hydra}")
"""The macros that write arguments as Hydra's overrides."""

_OURS = 'command: ["${env}", "trainkit", "train", "${args_no_hyphens}"]'
"""The command that messages propose."""

_ENVIRONMENT = re.compile(r"\$\{envvar:([A-Z0-9_]*)\}")
_BARE = re.compile(r"[A-Za-z0-9_/.+%*@?|-][A-Za-z0-9_/.+%*@?| :-]*")
_NOT_A_STRING = re.compile(r"true|false|null|nan|[+-]?inf|[+-]?[0-9].*", re.IGNORECASE)


def template_of(config: Mapping[str, Any]) -> list[str]:
    """The words of a sweep's `command`, or of W&B's default."""
    return [str(word) for word in config.get("command") or _DEFAULT]


def is_trainkit(config: Mapping[str, Any]) -> bool:
    """Whether a trial is `trainkit train`.

    >>> is_trainkit({"command": ["${env}", "trainkit", "train", "${args_no_hyphens}"]})
    True
    >>> is_trainkit({"program": "train.py"})
    False
    """
    words = [
        str(config.get("program")) if word == "${program}" else word
        for word in template_of(config)
    ]
    pairs = zip(words, words[1:], strict=False)
    return any(Path(a).name == "trainkit" and b == "train" for a, b in pairs)


def fixed_words(config: Mapping[str, Any]) -> list[str]:
    """The arguments of `trainkit train` in `command`, without the swept ones.

    >>> command = ["trainkit", "train", "logger=wandb", "-cd", "conf", "${args}"]
    >>> fixed_words({"command": command})
    ['--config-dir=conf', 'logger=wandb']
    """
    words = template_of(config)
    after = words[words.index("train") + 1 :]
    named = [_ENVIRONMENT.sub(_of_environment, word) for word in after]
    return options_first([word for word in named if not word.startswith("${")])


def command_line(
    config: Mapping[str, Any],
    arguments: Mapping[str, Any],
    *,
    more: Sequence[str] = (),
    json_file: str = "",
) -> list[str]:
    """The words to run for one trial.

    `trainkit train` gets nested parameters as dotted overrides, and values in Hydra's
    notation. Any other program gets the words that `wandb agent` would give it.

    Args:
        config: the sweep.
        arguments: the trial's arguments.
        more: words that follow the arguments.
        json_file: the file of the arguments, for `${args_json_file}`.
    """
    macros = _macros(config, arguments, more)
    macros["${args_json_file}"] = [json_file]
    words: list[str] = []
    for word in template_of(config):
        named = _ENVIRONMENT.sub(_of_environment, word)
        words += macros.get(named, [named])
    return words


def _of_environment(found: re.Match[str]) -> str:
    return os.environ.get(found[1], found[1])


def _macros(
    config: Mapping[str, Any], arguments: Mapping[str, Any], more: Sequence[str]
) -> dict[str, list[str]]:
    pairs = [f"{name}={value}" for name, value in arguments.items()]
    if is_trainkit(config):
        pairs = [f"{k}={hydra_text(v)}" for k, v in flatten(arguments).items()]
    flags = [
        f"--{name}" if value is True else f"--{name}={value}"
        for name, value in arguments.items()
        if value is not False
    ]
    split = [w for name, value in arguments.items() for w in (f"--{name}", str(value))]
    return {
        "${env}": ["/usr/bin/env"],
        "${interpreter}": [sys.executable],
        "${program}": [str(config.get("program"))],
        "${args}": [f"--{pair}" for pair in pairs] + list(more),
        "${args_no_hyphens}": pairs + list(more),
        "${args_append_hydra}": [f"+{pair}" for pair in pairs] + list(more),
        "${args_override_hydra}": [f"++{pair}" for pair in pairs] + list(more),
        "${args_no_boolean_flags}": flags + list(more),
        "${args_no_equals}": split + list(more),
        "${args_json}": [json.dumps(dict(arguments))],
    }


def hydra_text(value: Any) -> str:
    """A value in the notation of Hydra's overrides.

    >>> hydra_text(0.1), hydra_text(None), hydra_text(True), hydra_text("val/loss")
    ('0.1', 'null', 'true', 'val/loss')
    >>> hydra_text("a,b"), hydra_text(["x", 1]), hydra_text({"k": None})
    ("'a,b'", '[x,1]', '{k:null}')
    >>> hydra_text("1.0")
    "'1.0'"
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        pairs = (f"{key}:{hydra_text(each)}" for key, each in value.items())
        return "{" + ",".join(pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(hydra_text(each) for each in value) + "]"
    if isinstance(value, str) and not _reads_as_itself(value):
        return quoted(value)
    return str(value)


def _reads_as_itself(text: str) -> bool:
    is_bare = _BARE.fullmatch(text) is not None and text == text.strip()
    return is_bare and _NOT_A_STRING.fullmatch(text) is None


def check_command(config: Mapping[str, Any], *, where: str) -> None:
    """Refuse a command that cannot run, or that does not pass the arguments on."""
    command = config.get("command")
    if command is not None and (not isinstance(command, list) or not command):
        raise TrainkitError(
            f"{where} command: must be a list of words, received {command!r}. Write "
            f"{_OURS}."
        )
    words = template_of(config)
    if "${program}" in words and not config.get("program"):
        raise TrainkitError(
            f"{where} program: must name the program of a trial, and is missing. Write "
            f"program: train.py, or {_OURS}."
        )
    is_ours = is_trainkit(config) or Path(str(config.get("program"))).name == "trainkit"
    # https://github.com/wandb/wandb/issues/4686
    if is_ours and not set(words) & set(_HYDRA_ARGS):
        given = "is missing" if command is None else f"has {' '.join(words)!r}"
        raise TrainkitError(
            f"{where} command: `trainkit train` takes key=value without hyphens, so it "
            f"needs ${{args_no_hyphens}}; the file's command {given}. Write {_OURS}."
        )
