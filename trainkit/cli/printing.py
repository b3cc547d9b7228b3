"""The first line of a command that loads for seconds, and tables in plain text."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence

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
