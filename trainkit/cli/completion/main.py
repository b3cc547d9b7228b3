"""`trainkit completion`: what the shell offers when Tab is pressed."""

from __future__ import annotations

import os
from collections.abc import Iterable

from trainkit.cli.arguments import Arguments
from trainkit.cli.completion.options import cached_options, output_of
from trainkit.cli.completion.scripts import SCRIPTS
from trainkit.cli.main import COMMANDS

EPILOG = """\
In the shell's start-up file:
  bash   eval "$(trainkit completion bash)"
  zsh    eval "$(trainkit completion zsh)"
  fish   trainkit completion fish | source

It completes the command `trainkit`, not `python -m trainkit`. The options of fit,
validate, test and predict take some seconds the first time, and are then kept in
$XDG_CACHE_HOME/trainkit.
"""


def main(argv: list[str]) -> int:
    """Print the script of a shell, or what may follow on a line.

    Args:
        argv: the arguments after `completion`.

    Returns:
        The exit status, 0.

    Raises:
        TrainkitError: there is no such shell.
    """
    parser = Arguments(
        prog="trainkit completion", description="Shell completion.", epilog=EPILOG
    )
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("shell", nargs="?", choices=list(SCRIPTS))
    asked.add_argument(
        "--query", metavar="LINE", help="print what may follow (the scripts ask this)"
    )
    args = parser.parse_args(argv)
    if args.query is None:
        print(SCRIPTS[args.shell], end="")
    else:
        for candidate in complete(args.query):
            print(candidate)
    return 0


def complete(line: str) -> list[str]:
    """What the last word of a line may become.

    >>> complete("trainkit pl")
    ['plan']
    >>> complete("trainkit plan --rule l")
    ['linear']

    Args:
        line: up to the cursor, from the command's name on.
    """
    words = line.split()
    if not line or line[-1].isspace():
        words.append("")
    *before, word = words[1:] or [""]
    if not before:
        return _that_begin(word, [*COMMANDS, *_options(word, "--help", "--version")])
    command, *before = before
    if command not in COMMANDS:
        return []
    return _of_command(command, before, word)


def _of_command(command: str, before: list[str], word: str) -> list[str]:
    if command == "completion" and not before:
        return _that_begin(word, SCRIPTS)
    if command == "train" and not _is_about_option(before, word):
        return _of_hydra(before, word)
    asks = "--hydra-help" if command == "train" else ""
    options, takes_words = cached_options(command, asks)
    last = options.get(before[-1]) if before else None
    name, equals, _ = word.partition("=")
    if equals and name in options:
        choices = options[name].choices
        return _that_begin(word, [f"{name}={choice}" for choice in choices])
    if last is not None and (last.takes_value or last.choices):
        return _that_begin(word, last.choices)
    if command == "plan" and "--probe" in before and not word.startswith("-"):
        overrides = [each for each in before if "=" in each and each[0] != "-"]
        return _of_hydra(overrides, word)
    if takes_words and not word.startswith("-"):
        return []
    return _that_begin(word, options)


def _is_about_option(before: list[str], word: str) -> bool:
    """Whether Hydra's own options, which its completion leaves out, are meant."""
    return word.startswith("-") or before[-1:] in (["--cfg"], ["--info"])


def _of_hydra(before: list[str], word: str) -> list[str]:
    """What Hydra's completion says; it reads the line from `COMP_LINE`.

    It knows nothing of several values for `--multirun`, `group=a,b`: it is asked for
    the last one.
    """
    key, equals, values = word.partition("=")
    others, comma, last = values.rpartition(",")
    asked = f"{key}{equals}{last}"
    os.environ["COMP_LINE"] = " ".join(["trainkit", *before, asked])
    found = output_of("train", "-sc", "query=fish").splitlines()
    start = f"{key}{equals}{others}{comma}"
    return [start + each[len(key + equals) :] for each in _that_begin(asked, found)]


def _options(word: str, *names: str) -> tuple[str, ...]:
    return names if word.startswith("-") else ()


def _that_begin(word: str, candidates: Iterable[str]) -> list[str]:
    return [each for each in candidates if each.startswith(word)]
