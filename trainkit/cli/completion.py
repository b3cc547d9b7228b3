"""`trainkit completion`: the script of a shell, and the candidates for a line of it.

A script of argcomplete's puts the line into environment variables, and reads the
answer. The parser of the command answers, at the point where it would otherwise parse.
"""

from __future__ import annotations

import io
import os
import shlex
from argparse import ArgumentParser, Namespace
from contextlib import redirect_stdout
from typing import Any, NoReturn

from argcomplete.completers import FilesCompleter
from argcomplete.lexers import split_line
from argcomplete.shell_integration import shellcode

from trainkit.cli.console import Arguments, offer
from trainkit.cli.main import COMMANDS, EVALUATE
from trainkit.cli.main import main as trainkit
from trainkit.cli.training_words import TRAININGS
from trainkit.cli.words import CONFIG_DIR, CONFIG_NAME, CONFIG_PATH, completed, key_of

EPILOG = """\
In the shell's start-up file:
  bash   eval "$(trainkit completion bash)"
  zsh    eval "$(trainkit completion zsh)"
  fish   trainkit completion fish | source

It completes the command `trainkit`, not `python -m trainkit`, and not the options of
the Lightning CLI, which trainkit fit --help lists.
"""

BEFORE = {
    "bash": "",
    "zsh": "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -D }\n",
    "fish": "",
}
"""The lines that a shell may need before its script."""

_before: list[str] = []
"""The overrides that are already on the line."""


def main(argv: list[str]) -> int:
    """Print the script of a shell, or the candidates for a line of it."""
    if not argv and "_ARGCOMPLETE" in os.environ:
        answer()
    parser = Arguments(
        prog="trainkit completion", description="Shell completion.", epilog=EPILOG
    )
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("shell", nargs="?", choices=list(BEFORE))
    asked.add_argument(
        "--query", metavar="LINE", help="print the candidates for a line"
    )
    args = parser.parse_args(argv)
    if args.query is not None:
        os.environ |= {
            "_ARGCOMPLETE": "1",
            "_ARGCOMPLETE_IFS": "\n",
            "_ARGCOMPLETE_STDOUT_FILENAME": "/dev/stdout",
            "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
            "COMP_LINE": args.query,
            "COMP_POINT": str(len(args.query)),
        }
        answer()
    print(BEFORE[args.shell] + shellcode(["trainkit"], shell=args.shell))
    return 0


def answer() -> NoReturn:
    """Write the answer, and exit."""
    line, point = os.environ["COMP_LINE"], int(os.environ["COMP_POINT"])
    quote, word, _, before, _ = split_line(line, point)
    if len(before) < 2:
        offer(_parser_of_all())
    program, command, *before = before
    if command in ("check", "lengths"):
        at = next((i for i, each in enumerate(before) if each in TRAININGS), None)
        if at is not None:
            command, *before = before[at:]
    about = COMMANDS.get(command, ("",))[0]
    if about == EVALUATE and not before and not word.startswith("-"):
        offer(_parser_of_evaluation())
    # argparse takes overrides in one place only, but Hydra also between options.
    _before[:] = [each for each in before if _is_override(each)]
    others = [each for each in before if not _is_override(each)]
    line = f"{shlex.join([program, command, *others])} {quote}{word}"
    # The parser reads the words from the second on.
    os.environ |= {"_ARGCOMPLETE": "2", "COMP_LINE": line, "COMP_POINT": f"{len(line)}"}
    if command == "train":
        offer(_parser_of_train(), options=False)
    elif about in (COMMANDS["fit"][0], EVALUATE):
        raise SystemExit(0)  # Lightning's options, whose parser takes seconds to make
    trainkit([command, "--help"])  # its parser then has all options
    raise SystemExit(0)


def _parser_of_evaluation() -> Arguments:
    parser = Arguments(prog="trainkit")
    parser.add_argument("command")
    parser.add_argument("run").completer = FilesCompleter()  # type: ignore[attr-defined]
    return parser


def _is_override(word: str) -> bool:
    return word.startswith("~") or ("=" in word and not word.startswith("-"))


def _parser_of_train() -> ArgumentParser:
    from trainkit.config._compat import hydra_arguments

    parser = hydra_arguments()
    for action in parser._actions:
        if action.dest == "overrides":
            action.completer = like  # type: ignore[attr-defined]
    return parser


def _parser_of_all() -> Arguments:
    parser = Arguments(prog="trainkit")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("command", choices=list(COMMANDS))
    return parser


def like(prefix: str, parsed_args: Namespace, **_: Any) -> list[str]:
    """The overrides that begin with a word; a completer for argcomplete.

    Hydra does not complete several values (`group=a,b`, for `--multirun`): it is asked
    for the last one only.

    Args:
        prefix: the word.
        parsed_args: the options before it, with the places of configurations.
    """
    if not getattr(parsed_args, "probe", True):
        return []  # `trainkit plan` takes overrides only with --probe
    key, equals, values = prefix.partition("=")
    others, comma, last = values.rpartition(",")
    asked = f"{key}{equals}{last}"
    found = [each for each in _ask(asked, parsed_args) if each.startswith(asked)]
    while len(found) == 1 and found[0].endswith("."):  # a shell would add a space
        found = _ask(found[0], parsed_args)
    start = f"{key}{equals}{others}{comma}"
    return [start + each[len(key + equals) :] for each in found]


def places_in(args: Namespace) -> list[str]:
    """The options for the places of configurations, as words of `trainkit train`."""
    return [
        f"{option}={value}"
        for option in (CONFIG_DIR, CONFIG_NAME, CONFIG_PATH)
        if (value := getattr(args, option[2:].replace("-", "_"), None))
    ]


def _ask(word: str, given: Namespace) -> list[str]:
    places = places_in(given)
    # Hydra composes this line, so it needs the experiment that the line leaves out.
    words = [*_before, word]
    whole = completed([*places, *words])
    added = [each for each in whole if each not in (*places, *words)]
    added = [each for each in added if key_of(each) == "experiment"]
    os.environ["COMP_LINE"] = " ".join(["trainkit", *added, *words])
    with redirect_stdout(io.StringIO()) as printed:
        status = trainkit(["train", *places, "-sc", "query=fish"])
    return [] if status else printed.getvalue().splitlines()
