"""The names of the options of fit, validate, test and predict, kept in a file.

The parsers of these commands import torch and Lightning, which takes seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trainkit import __version__
from trainkit.cli.arguments import Arguments
from trainkit.pages.atomic_file import write_atomically


def parser_of(command: str) -> Arguments:
    """A parser with a command's options, made without torch if the file exists."""
    parser = Arguments(prog=f"trainkit {command}")
    for strings in _kept()[command]:
        if "--help" not in strings:  # each parser has it already
            parser.add_argument(*strings)
    return parser


def _kept() -> dict[str, list[list[str]]]:
    made_by = f"{__version__}-{version('lightning')}-{version('jsonargparse')}"
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(root, "trainkit", f"options-{made_by}.json")
    with contextlib.suppress(OSError, ValueError):  # it is missing or damaged
        return json.loads(path.read_text(encoding="utf-8"))
    found = _made()
    with contextlib.suppress(OSError):  # the home folder cannot be written to
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(found))  # another shell may be asking
    return found


class _Made(Exception):
    """Raised once the parsers are made: nothing is to be parsed."""


def _made() -> dict[str, list[list[str]]]:
    """The names of the options of each command."""
    from trainkit.cli.fit.cli import TrainkitCLI

    made: list[Any] = []

    class Parsers(TrainkitCLI):
        def init_parser(self, **kwargs: Any) -> Any:
            made.append(super().init_parser(**kwargs))
            return made[-1]

        def parse_arguments(self, parser: Any, args: Any) -> None:
            raise _Made

    with contextlib.suppress(_Made):
        Parsers()
    _, *parsers = made  # the first has them as sub-commands
    return {
        command: [list(x.option_strings) for x in parser._actions if x.option_strings]
        for command, parser in zip(TrainkitCLI.subcommands(), parsers, strict=True)
    }
