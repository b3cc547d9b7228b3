"""The one error class of trainkit, and what helps to understand an error."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TrainkitError(ValueError):
    """A request that cannot be carried out exactly.

    Its text names the thing, the rule, the value received, and what to do.
    """


TRACEBACK = "TRAINKIT_TRACEBACK"
"""The environment variable that makes the command show where an error was raised."""


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """A sentence with the known name closest to a wrong one; empty if none is close.

    >>> did_you_mean("trains", ["train", "fit"]), did_you_mean("x", ["train"])
    (' Did you mean train?', '')
    """
    close = difflib.get_close_matches(str(name), known, n=1)
    return f" Did you mean {close[0]}?" if close else ""
