"""`trainkit check`: measure whether a window of a training is the big batch."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainkit.cli.composition import aside, built, words_behind
from trainkit.cli.console import Arguments, say_loading
from trainkit.cli.door import Door, in_words
from trainkit.core.plan.options import check_whole_number
from trainkit.errors import TrainkitError
from trainkit.lit.callback.table import show

_ABOUT = """\
Measure whether a window of a training is the big batch, and say why not. After
`trainkit check` stand the words with which one would train. A few rows of the training
data run through training_step, as one batch and in parts, and gradients are compared.
Nothing is trained or logged, and nothing but the page of --html is saved.
"""
_EXIT = """\
exit status: 0 exact, 1 not, 2 a mistake in what was asked

examples:
  trainkit check train experiment=digits_bn
  trainkit check --html=proof.html train accumulation=uniform
  trainkit check fit --model=my_project.MyModule --data=my_project.MyData
"""


def main(argv: list[str]) -> int:
    """Run `trainkit check`, and return the exit status."""
    options, words = _parse(argv)
    say_loading("check", argv)
    door: Any = words[0]
    with aside(door) as folder:
        trainer, report = _reported(words, folder, options.rows)
    if not trainer.is_global_zero:
        return 0 if report.exact else 1
    report = _in_words(door, report)
    if options.json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        show(report.rows())
    if options.html is not None:
        command = shlex.join(["trainkit", "check", *argv])
        page = Path(options.html).absolute()
        _write_page(report, page, command)
        # With --json, what is printed must be JSON.
        where = sys.stderr if options.json else sys.stdout
        print(f"trainkit | page: {page}", file=where)
    return 0 if report.exact else 1


def _parse(argv: Sequence[str]) -> tuple[Any, list[str]]:
    """Our own options, and behind them the words of the training."""
    parser = Arguments(prog="trainkit check", description=_ABOUT, epilog=_EXIT)
    parser.usage = "trainkit check [--json] [--html[=FILE]] [--rows N] train|fit ..."
    add = parser.add_argument
    add("--json", action="store_true", help="print the report as JSON")
    page = "write the report as a page too, without =FILE as check.html"
    html: Any = add("--html", nargs="?", const="check.html", metavar="FILE", help=page)
    few = "use at most so many rows (default 24)"
    add("--rows", type=int, default=24, metavar="N", help=few)
    html.completer = lambda **_: ()
    options, words = words_behind(parser, argv, example="train experiment=digits_bn")
    check_whole_number("trainkit check --rows", options.rows, least=2)
    return options, words


def _in_words(door: Door, report: Any) -> Any:
    """The report with what helps in the words of the command."""
    causes = (
        replace(
            each,
            text=in_words(door, each.text),
            remedy=tuple(in_words(door, line) for line in each.remedy),
        )
        for each in report.causes
    )
    return replace(report, causes=tuple(causes))


def _write_page(report: Any, path: Path, command: str) -> None:
    try:
        report.to_html(path, command=command)
    except OSError as error:
        raise TrainkitError(
            f"trainkit check --html: {path} cannot be written: {error}. Name a file in "
            f"a folder that can be written to: --html=FILE."
        ) from error


def _reported(words: Sequence[str], folder: str, rows: int) -> tuple[Any, Any]:
    """The Trainer, and what `check` measures."""
    from trainkit.cli.runs.ranks import ranks_of_one_run
    from trainkit.lit.front.check import check

    trainer, *of = built("trainkit check", words, folder)
    with ranks_of_one_run(trainer) if words[0] == "train" else nullcontext():
        return trainer, check(*of, trainer=trainer, rows=rows)
