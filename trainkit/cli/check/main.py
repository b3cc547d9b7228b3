"""`trainkit check`: measure whether a window of a training is the big batch."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainkit.cli.loading import say_loading
from trainkit.cli.words import find_modules_here, options_first, refuse_another_app
from trainkit.errors import TrainkitError
from trainkit.lit.callback.table import show

CHECKED = ("train", "fit")
"""The commands that may stand behind it."""

HELP = """\
usage: trainkit check [--json] [--html[=FILE]] [--rows N] train [OVERRIDES]
       trainkit check [--json] [--html[=FILE]] [--rows N] fit [OPTIONS]

Measure whether a window of a training is the big batch, and say why not. After
`trainkit check` stand the words with which one would train. A few rows of the training
data run through training_step, as one batch and in parts, and gradients are compared.
Nothing is trained or logged, and nothing but the page of --html is saved.

options, before the word train or fit:
  --json         print the report as JSON
  --html[=FILE]  write the report as a page too (default check.html)
  --rows N       use at most so many rows (default 24)

exit status: 0 exact, 1 not, 2 a mistake in what was asked

examples:
  trainkit check train experiment=digits_bn
  trainkit check --html=proof.html train accumulation=uniform
  trainkit check fit --model=my_project.MyModule --data=my_project.MyData
"""


def main(argv: list[str]) -> int:
    """Run `trainkit check`, and return the exit status."""
    options, words = _taken_apart(argv)
    if options is None:
        print(HELP, end="")
        return 0
    say_loading("check", argv)
    from trainkit.lit.quiet import without_advice

    find_modules_here()
    folders = tempfile.TemporaryDirectory(prefix="trainkit-check-")
    with without_advice(), folders as folder:
        build = {"train": _of_train, "fit": _of_fit}[words[0]]
        trainer, report = build(words[1:], folder, options["rows"])
    if not trainer.is_global_zero:
        return 0 if report.exact else 1
    if options["json"]:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        show(report.rows())
    if options["html"] is not None:
        command = shlex.join(["trainkit", "check", *argv])
        _write_page(report, options["html"], command)
        # With --json, what is printed must be JSON.
        aside = sys.stderr if options["json"] else sys.stdout
        print(f"trainkit | page: {options['html']}", file=aside)
    return 0 if report.exact else 1


def _write_page(report: Any, path: Path, command: str) -> None:
    try:
        report.to_html(path, command=command)
    except OSError as error:
        raise TrainkitError(
            f"trainkit check --html: {path} cannot be written: {error}. Name a file in "
            f"a folder that can be written to: --html=FILE."
        ) from error


def _of_train(words: Sequence[str], folder: str, rows: int) -> tuple[Any, Any]:
    from omegaconf import open_dict

    from trainkit.cli.composition import Composition
    from trainkit.cli.runs.ranks import ranks_of_one_run
    from trainkit.config.build import build
    from trainkit.lit.front.check import checked

    words = options_first(words)
    refuse_another_app(words)
    config = Composition(words).config
    with open_dict(config):
        config.paths.run_dir = folder
    training = build(config)
    with ranks_of_one_run(training.trainer):
        of = training.module, training.data
        report = checked(*of, None, None, training.trainer, rows, "train")
    return training.trainer, report


def _of_fit(words: Sequence[str], folder: str, rows: int) -> tuple[Any, Any]:
    from jsonargparse import ArgumentError

    from trainkit.cli.fit.cli import TrainkitCLI
    from trainkit.lit._compat import replaced
    from trainkit.lit.front.check import checked

    try:
        # Given as arguments, Lightning warns that they are not the process's own.
        with replaced(sys, argv=["trainkit", *words]):
            cli: Any = TrainkitCLI(
                run=False,
                save_config_callback=None,
                trainer_defaults={"default_root_dir": folder},
                parser_kwargs={"prog": "trainkit check fit", "exit_on_error": False},
            )
    except ArgumentError as error:
        raise TrainkitError(str(error)) from error
    report = checked(cli.model, cli.datamodule, None, None, cli.trainer, rows, "fit")
    return cli.trainer, report


def _taken_apart(argv: Sequence[str]) -> tuple[dict[str, Any] | None, list[str]]:
    """Our own options, and the words of the training behind them; None for help."""
    options: dict[str, Any] = {"json": False, "html": None, "rows": 24}
    words = list(argv)
    while words and words[0].startswith("-"):
        name, has_value, value = words.pop(0).partition("=")
        if name in ("-h", "--help"):
            return None, []
        if name == "--json" and not has_value:
            options["json"] = True
        elif name == "--html":
            options["html"] = _page(value if has_value else "check.html")
        elif name == "--rows" and (has_value or words):
            options["rows"] = _whole(value if has_value else words.pop(0))
        else:
            raise TrainkitError(
                f"trainkit check {name}: must be --json, --html, --html=FILE or "
                f"--rows N, before the word train or fit. trainkit check --help "
                f"describes them."
            )
    if not words or words[0] not in CHECKED:
        received = repr(words[0]) if words else "nothing"
        raise TrainkitError(
            f"trainkit check: must be followed by train or fit, and the words that one "
            f"would train with, received {received}. For example: trainkit check train "
            f"experiment=digits_bn"
        )
    return options, words


def _whole(text: str) -> int:
    if not text.isdigit() or int(text) < 2:
        raise TrainkitError(
            f"trainkit check --rows: must be a whole number of at least 2, received "
            f"{text!r}."
        )
    return int(text)


def _page(text: str) -> Path:
    path = Path(text).absolute()
    # These of os know no error: a name may be too long.
    if not text or os.path.isdir(path) or not os.path.isdir(path.parent):
        raise TrainkitError(
            f"trainkit check --html: must be the name of a file in a folder that "
            f"exists, received {text!r}. For example: --html=check.html"
        )
    return path
