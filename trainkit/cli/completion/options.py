"""The options of a sub-command, read from what its `--help` prints.

The help is what argparse, jsonargparse and Hydra all offer in public, so that there is
no second list of options to keep.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from trainkit.cli.main import COMMANDS
from trainkit.cli.main import main as trainkit

SLOW = ("fit", "validate", "test", "predict")
"""Whose help imports torch and Lightning: kept in a file."""

_OPTION = re.compile(
    r"^[ \t]*(?:-\w{1,2}(?: [^\s,]+)?, )?"  # "-h, ", "-c CONFIG, "
    r"(?P<name>--[\w.-]+)(?:,-\w+)?"  # "--help", Hydra: "--cfg,-c"
    r"(?P<value> (?![ :\[])\S+)?",  # " TARGET", " {a,b}"; " [FLAGS]" may be left out
    re.MULTILINE,
)
_BRACES = re.compile(r"^ \{([^{}]+)\}$")  # argparse
_BRACKETS = re.compile(r"^: [^\[]* \[([\w-]+(?:\|[\w-]+)+)\]")  # Hydra
_CLASSES = re.compile(r"known subclasses: ([\w.]+(?:, [\w.]+)*)\)")  # jsonargparse


@dataclass(frozen=True)
class Option:
    """What may follow an option.

    Attributes:
        choices: the values that are known; where they are classes, others may do too.
        takes_value: whether a value follows at all.
    """

    choices: tuple[str, ...] = ()
    takes_value: bool = False


def options_of(help_text: str) -> dict[str, Option]:
    """The options that a help describes, in its order.

    >>> options_of("  --rule {linear,sqrt}  one only\\n  --json   JSON")["--rule"]
    Option(choices=('linear', 'sqrt'), takes_value=True)
    >>> options_of("--cfg,-c : Show config instead of running [job|hydra|all]")["--cfg"]
    Option(choices=('job', 'hydra', 'all'), takes_value=False)
    """
    options: dict[str, Option] = {}
    help_text = help_text.replace(
        " \b", ""
    )  # jsonargparse: "--print_config \b[=flags]"
    for name, value, said in _described(help_text):
        earlier = options.get(name, Option())  # in the usage, or an example
        options[name] = Option(
            _choices(value, said) or earlier.choices,
            bool(value) or earlier.takes_value,
        )
    return options


def _described(help_text: str) -> Iterator[tuple[str, str, str]]:
    """Each option's name, its value's place holder, and what is said of it."""
    starts = list(_OPTION.finditer(help_text))
    ends = [start.start() for start in starts[1:]] + [len(help_text)]
    for start, end in zip(starts, ends, strict=True):
        said = help_text[start.end() : end]
        yield start["name"], start["value"] or "", " ".join(said.split())


def _choices(value: str, said: str) -> tuple[str, ...]:
    if braces := _BRACES.search(value):
        return tuple(braces[1].split(","))
    if brackets := _BRACKETS.search(said):
        return tuple(brackets[1].split("|"))
    if classes := _CLASSES.search(said):
        paths = classes[1].split(", ")
        names = [path.rpartition(".")[2] for path in paths]
        return tuple(
            name if names.count(name) == 1 else path
            for name, path in zip(names, paths, strict=True)
        )
    return ()


def cached_options(command: str, how: str = "") -> tuple[dict[str, Option], bool]:
    """A sub-command's options, and whether it takes words that are none.

    Args:
        command: its name.
        how: the option that shows its options; `--help` where it is empty.
    """
    text = _help_of(command, how or "--help")
    return options_of(text), "positional arguments:" in text


def output_of(*argv: str) -> str:
    """What `trainkit` prints; nothing where it fails.

    A completion has nowhere to say what went wrong: the shell would print it into the
    line that is being written.
    """
    printed = io.StringIO()
    silence = io.StringIO()
    status: object = 0
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(silence):
        try:
            status = trainkit(list(argv))
        except SystemExit as done:  # argparse, after --help
            status = done.code
    return "" if status else printed.getvalue()


def _help_of(command: str, how: str) -> str:
    if command not in SLOW:
        return output_of(command, how)
    path = _cache_of(command)
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8")
    text = output_of(command, how)
    if text:
        with contextlib.suppress(OSError):  # a home that cannot be written to
            _write(path, text)
    return text


def _cache_of(command: str) -> Path:
    """Where a help is kept; another path once anything that makes it has changed."""
    spec = find_spec(COMMANDS[command][0])
    made_by = [
        version(package) for package in ("trainkit", "lightning", "jsonargparse")
    ]
    if spec is not None and spec.origin is not None:
        made_by.append(str(Path(spec.origin).stat().st_mtime_ns))
    key = hashlib.sha256(" ".join(made_by).encode()).hexdigest()[:12]
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "trainkit" / f"{command}-{key}.help"


def _write(path: Path, text: str) -> None:
    """At once: another shell may be asking at the same moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, delete=False, encoding="utf-8"
    ) as file:
        file.write(text)
    os.replace(file.name, path)
