"""Overrides of `trainkit train` that a word may become, as Hydra completes them."""

from __future__ import annotations

import io
import os
from argparse import Namespace
from contextlib import redirect_stdout
from typing import Any

from trainkit.cli.main import main as trainkit
from trainkit.cli.words import CONFIG_DIR, CONFIG_NAME, CONFIG_PATH

before: list[str] = []
"""The overrides that stand on the line already."""


def like(prefix: str, parsed_args: Namespace, **_: Any) -> list[str]:
    """What an override may become, in the form that argcomplete asks for.

    Hydra knows nothing of several values for `--multirun`, `group=a,b`: it is asked for
    the last one.

    Args:
        prefix: the word.
        parsed_args: the words before it, with the places of configurations.
    """
    if not getattr(parsed_args, "probe", True):
        return []  # `trainkit plan` takes them with --probe alone
    key, equals, values = prefix.partition("=")
    others, comma, last = values.rpartition(",")
    asked = f"{key}{equals}{last}"
    found = [each for each in _ask(asked, parsed_args) if each.startswith(asked)]
    while len(found) == 1 and found[0].endswith("."):  # shells would add a space
        found = _ask(found[0], parsed_args)
    start = f"{key}{equals}{others}{comma}"
    return [start + each[len(key + equals) :] for each in found]


def _ask(word: str, given: Namespace) -> list[str]:
    places = [
        f"{option}={value}"
        for option in (CONFIG_DIR, CONFIG_NAME, CONFIG_PATH)
        if (value := getattr(given, option[2:].replace("-", "_"), None))
    ]
    os.environ["COMP_LINE"] = " ".join(["trainkit", *before, word])
    with redirect_stdout(io.StringIO()) as printed:
        status = trainkit(["train", *places, "-sc", "query=fish"])
    return [] if status else printed.getvalue().splitlines()
