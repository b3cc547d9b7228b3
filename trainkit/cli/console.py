"""What all commands read and print: options, whose mistakes are a TrainkitError, the
first line of a command that loads for seconds, and tables in plain text."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from trainkit.errors import TrainkitError


class Arguments(argparse.ArgumentParser):
    """A parser that takes no shortened option names, and raises its errors.

    >>> parser = Arguments(prog="trainkit plan")
    >>> _ = parser.add_argument("--unit", choices=["rows", "tokens"])
    >>> parser.parse_args(["--unit", "rows"]).unit
    'rows'
    """

    def __init__(self, *, prog: str, description: str = "", epilog: str = "") -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            allow_abbrev=False,  # an option added later must not break a script
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        offer(self)
        return super().parse_args(*args, **kwargs)

    def parse_intermixed_args(self, *args: Any, **kwargs: Any) -> Any:
        offer(self)
        return super().parse_intermixed_args(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting.

        Raises:
            TrainkitError: always.
        """
        raise TrainkitError(
            f"{self.prog}: {message}. {self.prog} --help shows every option."
        )


def offer(parser: argparse.ArgumentParser) -> None:
    """Print completions and exit if the shell asks for them; otherwise do nothing."""
    if "_ARGCOMPLETE" not in os.environ:
        return
    import argcomplete

    argcomplete.autocomplete(
        parser,
        always_complete_options=False,  # only once a hyphen is typed
        exit_method=sys.exit,  # closes files; its own exit does not
    )


_ONLY_ANSWERS = {"-h", "--help", "--version", "--json", "--print_config"}
_RANKS = ("LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "RANK", "SLURM_PROCID")


def say_loading(
    command: str, words: Sequence[str] = (), *, silent: Collection[str] = _ONLY_ANSWERS
) -> None:
    """Say that torch and Lightning are being loaded, if they are not there yet.

    Only the first rank says it.

    Args:
        command: the sub-command.
        words: its command line.
        silent: options that print something else, which the line would spoil.
    """
    is_asked = any(word.partition("=")[0] in silent for word in words)
    if is_first_rank() and not is_asked and "lightning.pytorch" not in sys.modules:
        print(f"trainkit | {command}: loading torch and Lightning ...", flush=True)


def is_first_rank() -> bool:
    """Whether a launcher, if there is one, calls this process the first."""
    return all(os.environ.get(name) in (None, "", "0") for name in _RANKS)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table; each column is as wide as its widest cell.

    >>> aligned([["run", "loss"], ["best one", "0.25"]])
    ['run       loss', 'best one  0.25']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
