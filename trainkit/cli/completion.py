"""`trainkit completion`: the script of a shell, and the candidates for a line of it.

A script of argcomplete's puts the line into environment variables, and reads the
answer. The parser of the command answers, at the point where it would otherwise parse.
"""

from __future__ import annotations

import io
import os
from argparse import ArgumentParser, Namespace
from contextlib import redirect_stdout
from typing import Any, NoReturn

from argcomplete.lexers import split_line
from argcomplete.shell_integration import shellcode

from trainkit.cli.console import Arguments, offer
from trainkit.cli.main import COMMANDS, EVALUATE
from trainkit.cli.main import main as trainkit
from trainkit.cli.words import CONFIG_DIR, CONFIG_NAME, CONFIG_PATH, completed, key_of

EPILOG = """\
In the shell's start-up file:
  bash   eval "$(trainkit completion bash)"
  zsh    eval "$(trainkit completion zsh)"
  fish   trainkit completion fish | source

It completes the command `trainkit`, not `python -m trainkit`, and not the options of
the Lightning CLI, which trainkit fit --help lists.
"""

_OF_LIGHTNING = (COMMANDS["fit"][0], EVALUATE)

BEFORE = {
    "bash": "",
    "zsh": "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -D }\n",
    "fish": "",
}
"""The lines that a shell may need before its script."""


def main(argv: list[str]) -> int:
    """Print the script of a shell, or answer what such a script asks."""
    if not argv and "_ARGCOMPLETE" in os.environ:
        answer()
    parser = Arguments(
        prog="trainkit completion", description="Shell completion.", epilog=EPILOG
    )
    parser.add_argument("shell", choices=list(BEFORE))
    shell = parser.parse_args(argv).shell
    print(BEFORE[shell] + shellcode(["trainkit"], shell=shell))
    return 0


def answer() -> NoReturn:
    """Write the answer, and exit."""
    before = _words()[:-1]
    if len(before) < 2:
        parser = Arguments(prog="trainkit")
        parser.add_argument("command", choices=list(COMMANDS))
        offer(parser)
    os.environ["_ARGCOMPLETE"] = "2"  # parsers read the words from the second on
    command = before[1]
    if command == "train":
        offer(_parser_of_train())
    # The parser of the Lightning CLI takes seconds to make.
    if command in COMMANDS and COMMANDS[command][0] not in _OF_LIGHTNING:
        trainkit([command, "--help"])  # its parser then has all options
    raise SystemExit(0)


def _words() -> list[str]:
    """The words of the line, of which the last is to be completed."""
    line, point = os.environ["COMP_LINE"], int(os.environ["COMP_POINT"])
    _, word, _, before, _ = split_line(line, point)
    return [*before, word]


def _parser_of_train() -> ArgumentParser:
    from trainkit.config._compat import hydra_arguments

    parser = hydra_arguments()
    for action in parser._actions:
        if action.dest == "overrides":
            action.completer = like  # type: ignore[attr-defined]
    return parser


def like(prefix: str, parsed_args: Namespace, **_: Any) -> list[str]:
    """The overrides that begin with a word; a completer for argcomplete.

    Args:
        prefix: the word.
        parsed_args: the options before it, with the places of configurations.
    """
    if not getattr(parsed_args, "probe", True):
        return []  # `trainkit plan` takes overrides only with --probe
    places = places_in(parsed_args)
    # Hydra composes this line, so it needs the experiment that the line leaves out.
    words = [word for word in _words()[2:-1] if "=" in word and word[0] != "-"]
    whole = completed([*places, *words, prefix])
    added = [word for word in whole if key_of(word) == "experiment"]
    before = [word for word in words if word not in added]
    os.environ["COMP_LINE"] = " ".join(["trainkit", *added, *before, prefix])
    with redirect_stdout(io.StringIO()) as printed:
        status = trainkit(["train", *places, "-sc", "query=fish"])
    found = [] if status else printed.getvalue().splitlines()
    return [each for each in found if each.startswith(prefix)]


def places_in(args: Namespace) -> list[str]:
    """The options for the places of configurations, as words of `trainkit train`."""
    return [
        f"{option}={value}"
        for option in (CONFIG_DIR, CONFIG_NAME, CONFIG_PATH)
        if (value := getattr(args, option[2:].replace("-", "_"), None))
    ]
