"""`trainkit completion`: the script by which a shell completes `trainkit`."""

from __future__ import annotations

import os

from argcomplete.shell_integration import shellcode

from trainkit.cli.arguments import Arguments
from trainkit.cli.completion.answer import answer

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
