"""An argument parser that raises a TrainkitError for a mistake."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any, NoReturn

from trainkit.errors import TrainkitError


class Arguments(argparse.ArgumentParser):
    """A parser that takes no shortened option names, and raises its errors.

    >>> parser = Arguments(prog="trainkit plan")
    >>> _ = parser.add_argument("--rule", choices=["linear", "sqrt"])
    >>> parser.parse_args(["--rule", "linear"]).rule
    'linear'
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


def offer(parser: argparse.ArgumentParser, *, options: bool = True) -> None:
    """Print completions and exit if the shell asks for them; otherwise do nothing.

    Args:
        parser: of the command.
        options: whether options are offered before a hyphen is typed. They never are
            if the command needs another word first.
    """
    if "_ARGCOMPLETE" not in os.environ:
        return
    import argcomplete

    needs_word = any(not a.option_strings and a.nargs != "*" for a in parser._actions)
    argcomplete.autocomplete(
        parser,
        always_complete_options="long" if options and not needs_word else False,
        exit_method=sys.exit,  # closes files; its own exit does not
    )
