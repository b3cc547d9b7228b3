"""The options of fit, validate, test and predict, kept in a file.

The parsers of these commands import torch and Lightning, which takes seconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

from argcomplete.completers import ChoicesCompleter

from trainkit import __version__
from trainkit.cli.arguments import Arguments
from trainkit.pages.atomic_file import write_atomically


def parser_of(command: str) -> Arguments:
    """A parser with a command's options, made without torch if the file exists."""
    parser = Arguments(prog=f"trainkit {command}")
    for strings, nargs, choices in _kept()[command]:
        if "--help" not in strings:  # each parser has it already
            action: Any = parser.add_argument(*strings, nargs=nargs)
            if choices:  # a completer, since the command may take other values too
                action.completer = ChoicesCompleter(choices)
    return parser


def _kept() -> Any:
    path = _cache()
    with contextlib.suppress(OSError, ValueError):  # it is missing or damaged
        return json.loads(path.read_text(encoding="utf-8"))
    from trainkit.cli.fit.options import options

    found = options()
    with contextlib.suppress(OSError):  # the home folder cannot be written to
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(found))  # another shell may be asking
    return found


def _cache() -> Path:
    """The file of the options, with another name for other versions of their makers."""
    made_by = [__version__, version("lightning"), version("jsonargparse")]
    made_by.append(
        str(Path(__file__).parents[1].joinpath("fit/cli.py").stat().st_mtime)
    )
    key = hashlib.sha256(" ".join(made_by).encode()).hexdigest()[:12]
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "trainkit" / f"options-{key}.json"
