"""The `trainkit` command and its sub-commands."""

from __future__ import annotations

import logging
import os
import sys
from importlib import import_module

from trainkit.cli.console import say_loading
from trainkit.cli.errors import guarded, remember_ctrl_c
from trainkit.errors import TrainkitError, did_you_mean

EVALUATE = "trainkit.cli.evaluate.main"

COMMANDS = {
    "new": ("trainkit.cli.new.main", "make a folder for a training of your own"),
    "train": ("trainkit.cli.train.main", "train what a Hydra configuration describes"),
    "fit": ("trainkit.cli.fit.main", "train with the Lightning CLI"),
    "validate": (EVALUATE, "validate a run, or with the Lightning CLI"),
    "test": (EVALUATE, "test a run, or with the Lightning CLI"),
    "predict": (EVALUATE, "predict with a run, or with the Lightning CLI"),
    "check": ("trainkit.cli.check", "measure whether windows are the big batch"),
    "lengths": ("trainkit.cli.lengths", "write the lengths of a data set's rows"),
    "plan": ("trainkit.cli.plan", "find micro-batch and accumulation for a batch"),
    "sweep": ("trainkit.cli.sweep.main", "run a W&B sweep, with or without a server"),
    "report": ("trainkit.cli.report.main", "draw the charts of a run again"),
    "completion": ("trainkit.cli.completion", "print shell completion"),
}

HELP = """\
trainkit: gradient accumulation that is exactly the big batch

usage: trainkit COMMAND ...

{commands}

trainkit COMMAND --help describes a command, trainkit --version prints the version. With
TRAINKIT_TRACEBACK=1 in the environment, error messages include a traceback.
"""


def main(argv: list[str]) -> int:
    """Run a sub-command.

    Returns:
        the exit status: 0; 1 for a training that failed; 2 for a mistake in the
        arguments; 130 and 143 after SIGINT and SIGTERM.
    """
    return guarded(lambda: _dispatch(argv))


def run() -> None:
    """The entry point of the console script."""
    remember_ctrl_c()
    a_shell_asks = "_ARGCOMPLETE" in os.environ
    status = main(["completion"] if a_shell_asks else sys.argv[1:])
    if status == 130:
        logging.disable()  # half of torch, interrupted while it loads, reports at exit
    sys.exit(status)


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        lines = [f"  {name:<11} {text}" for name, (_, text) in COMMANDS.items()]
        print(HELP.format(commands="\n".join(lines)), end="")
        return 0 if argv else 2
    if argv[0] == "--version":
        from trainkit import __version__

        print(f"trainkit {__version__}")
        return 0
    if argv[0] not in COMMANDS:
        raise TrainkitError(
            f"command: must be one of {', '.join(COMMANDS)}, received {argv[0]!r}."
            f"{did_you_mean(argv[0], COMMANDS)} trainkit --help describes them."
        )
    module, _ = COMMANDS[argv[0]]
    if module in ("trainkit.cli.fit.main", EVALUATE):
        say_loading(argv[0], argv[1:])
        return import_module(module).main(argv)  # it has several commands
    return import_module(module).main(argv[1:])
