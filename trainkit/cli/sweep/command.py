"""The command of a trial, and the check that `trainkit train` takes its arguments."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from trainkit.cli.errors import is_mistake, readable
from trainkit.cli.sweep.sweep_file import SweepFile
from trainkit.cli.sweep.whole_config import hydra_text
from trainkit.cli.words import options_first, refuse_another_app
from trainkit.errors import TrainkitError


def command_line(
    sweep: SweepFile,
    arguments: Mapping[str, Any],
    *,
    more: Sequence[str] = (),
    json_file: str = "",
) -> list[str]:
    """The words of one trial, as `wandb agent` makes them; `more` follows them."""
    items = arguments.items()
    pairs = [f"{name}={value}" for name, value in items]
    flags = [
        f"--{n}" if v is True else f"--{n}={v}" for n, v in items if v is not False
    ]
    macros = {
        "${env}": ["/usr/bin/env"],
        "${interpreter}": [sys.executable],
        "${args}": [f"--{pair}" for pair in pairs],
        "${args_no_hyphens}": [*pairs, *more],
        "${args_append_hydra}": [f"+{pair}" for pair in pairs],
        "${args_override_hydra}": [*(f"++{pair}" for pair in pairs), *more],
        "${args_no_boolean_flags}": flags,
        "${args_no_equals}": [w for n, v in items for w in (f"--{n}", str(v))],
        "${args_json}": [json.dumps(dict(arguments))],
        "${args_json_file}": [json_file],
    }
    return [w for word in _named(sweep.words) for w in macros.get(word, [word])]


def _named(words: Sequence[str]) -> list[str]:
    """Words with the environment's variables filled in, by name where unknown."""
    names = re.compile(r"\$\{envvar:([A-Z0-9_]*)\}")
    return [names.sub(lambda m: os.environ.get(m[1], m[1]), word) for word in words]


def check_keys(sweep: SweepFile) -> None:
    """Refuse parameters that `trainkit train` would refuse in a trial.

    The configuration is composed with each parameter's first value, and with each text,
    since that may be an option of a group. Only other programs know their keys.
    """
    if not sweep.runs_trainkit:
        return
    from trainkit.cli.composition import Composition

    after = sweep.words[sweep.words.index("train") + 1 :]
    fixed = options_first([w for w in _named(after) if not w.startswith("${")])
    refuse_another_app(fixed)
    values = {
        name: each.values or [each.min if "min" in each.takes else each.value]
        for name, each in sweep.leaves.items()
    }
    first = {name: every[0] for name, every in values.items()}
    texts = [{n: v} for n, every in values.items() for v in every if isinstance(v, str)]
    for changed in [{}, *texts]:
        trial = {**first, **changed}
        words = [f"{name}={hydra_text(value)}" for name, value in trial.items()]
        try:
            _ = Composition([*fixed, *words]).config
        except Exception as error:
            if not is_mistake(error):
                raise
            raise TrainkitError(
                f"{sweep.path} parameters: `trainkit train` would refuse a trial with "
                f"{' '.join(words)}: {readable(error)}"
            ) from error
