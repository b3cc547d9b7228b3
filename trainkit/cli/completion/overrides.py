"""The overrides of `trainkit train` that begin with a word, from Hydra's completion."""

from __future__ import annotations

import io
import os
from argparse import Namespace
from contextlib import redirect_stdout
from typing import Any

from trainkit.cli.main import main as trainkit
from trainkit.cli.words import (
    CONFIG_DIR,
    CONFIG_NAME,
    CONFIG_PATH,
    completed,
    key_of,
)

before: list[str] = []
"""The overrides that are already on the line."""


def like(prefix: str, parsed_args: Namespace, **_: Any) -> list[str]:
    """The overrides that begin with a word; a completer for argcomplete.

    Hydra does not complete several values (`group=a,b`, for `--multirun`): it is asked
    for the last one only.

    Args:
        prefix: the word.
        parsed_args: the options before it, with the places of configurations.
    """
    if not getattr(parsed_args, "probe", True):
        return []  # `trainkit plan` takes overrides only with --probe
    key, equals, values = prefix.partition("=")
    others, comma, last = values.rpartition(",")
    asked = f"{key}{equals}{last}"
    found = [each for each in _ask(asked, parsed_args) if each.startswith(asked)]
    while len(found) == 1 and found[0].endswith("."):  # a shell would add a space
        found = _ask(found[0], parsed_args)
    start = f"{key}{equals}{others}{comma}"
    return [start + each[len(key + equals) :] for each in found]


def places_in(args: Namespace) -> list[str]:
    """The options for the places of configurations, as words of `trainkit train`."""
    return [
        f"{option}={value}"
        for option in (CONFIG_DIR, CONFIG_NAME, CONFIG_PATH)
        if (value := getattr(args, option[2:].replace("-", "_"), None))
    ]


def _ask(word: str, given: Namespace) -> list[str]:
    places = places_in(given)
    # Hydra composes this line, so it needs the experiment that the line leaves out.
    words = [*before, word]
    whole = completed([*places, *words])
    added = [each for each in whole if each not in (*places, *words)]
    added = [each for each in added if key_of(each) == "experiment"]
    os.environ["COMP_LINE"] = " ".join(["trainkit", *added, *words])
    with redirect_stdout(io.StringIO()) as printed:
        status = trainkit(["train", *places, "-sc", "query=fish"])
    return [] if status else printed.getvalue().splitlines()
