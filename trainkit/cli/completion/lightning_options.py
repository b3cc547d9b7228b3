"""The options of fit, validate, test and predict, kept in a file.

Their parsers stand on torch and Lightning, which take seconds to import.
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

from trainkit.cli.arguments import Arguments


def parser_of(command: str) -> Arguments:
    """A parser with a command's options, made without torch once they are known."""
    parser = Arguments(prog=f"trainkit {command}")
    for strings, nargs, choices in _kept()[command]:
        if "--help" not in strings:  # which each parser has by itself
            action: Any = parser.add_argument(*strings, nargs=nargs)
            if choices:  # others may do too
                action.completer = ChoicesCompleter(choices)
    return parser


def _kept() -> Any:
    path = _cache()
    with contextlib.suppress(OSError, ValueError):  # it is not there, or damaged
        return json.loads(path.read_text(encoding="utf-8"))
    from trainkit.cli.fit.options import options

    found = options()
    with contextlib.suppress(OSError):  # a home that cannot be written to
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")  # another shell may be asking
        unfinished.write_text(json.dumps(found), encoding="utf-8")
        unfinished.replace(path)
    return found


def _cache() -> Path:
    """Where they are kept; another path once anything that makes them has changed."""
    made_by = [version(name) for name in ("trainkit", "lightning", "jsonargparse")]
    made_by.append(
        str(Path(__file__).parents[1].joinpath("fit/cli.py").stat().st_mtime)
    )
    key = hashlib.sha256(" ".join(made_by).encode()).hexdigest()[:12]
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "trainkit" / f"options-{key}.json"
