"""The options of `trainkit fit | validate | test | predict`, as plain data."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from jsonargparse import ArgumentParser

from trainkit.cli.fit.cli import TrainkitCLI

Option = tuple[list[str], int | str | None, list[str]]
"""An option's names, argparse's `nargs`, and its known values."""


class _Made(Exception):
    """Raised once the parsers are made: nothing is to be parsed."""


def options() -> dict[str, list[Option]]:
    """The options of each command."""
    made: list[Any] = []

    class Parsers(TrainkitCLI):
        def init_parser(self, **kwargs: Any) -> Any:
            made.append(super().init_parser(**kwargs))
            return made[-1]

        def parse_arguments(self, parser: Any, args: Any) -> None:
            raise _Made

    with suppress(_Made):
        Parsers()
    _, *parsers = made  # the first has them as sub-commands
    return {
        command: options_of(parser)
        for command, parser in zip(TrainkitCLI.subcommands(), parsers, strict=True)
    }


def options_of(parser: ArgumentParser) -> list[Option]:
    """The options of one parser, in the parser's order."""
    return [
        (list(action.option_strings), _nargs(action), _choices(action))
        for action in parser._actions
        if action.option_strings
    ]


def _nargs(action: Any) -> int | str | None:
    """argparse's `nargs`; only the help shows that `--print_config` needs no value."""
    return "?" if "[" in str(action.metavar) else action.nargs


def _choices(action: Any) -> list[str]:
    """The values of a bool or an enum, or the names of classes, with their modules if
    two share a name."""
    shown = action.metavar or ""
    if isinstance(shown, str) and shown.startswith("{"):
        return shown.strip("{}").split(",")
    said = action.extra_help() if hasattr(action, "extra_help") else ""
    paths = said.removeprefix(", known subclasses: ").split(", ") if said else []
    names = [path.rpartition(".")[2] for path in paths]
    return [
        name if names.count(name) == 1 else path
        for name, path in zip(names, paths, strict=True)
    ]
