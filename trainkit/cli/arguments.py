"""Command lines of trainkit's own, whose mistakes are TrainkitErrors."""

from __future__ import annotations

import argparse
from typing import NoReturn

from trainkit.errors import TrainkitError


class Arguments(argparse.ArgumentParser):
    """A parser of whole option names that raises what the command line then shows.

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

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting.

        Raises:
            TrainkitError: always.
        """
        raise TrainkitError(
            f"{self.prog}: {message}. {self.prog} --help shows every option."
        )
