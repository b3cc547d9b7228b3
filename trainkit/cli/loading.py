"""The first line of a command that needs seconds to load its libraries."""

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
