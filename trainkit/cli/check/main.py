"""`trainkit check`: measure whether a window of a training is the big batch."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from trainkit.cli.arguments import Arguments
from trainkit.cli.door import Door, in_words, spoken
from trainkit.cli.loading import say_loading
from trainkit.cli.words import find_modules_here, options_first, refuse_another_app
from trainkit.core.plan.options import check_whole_number
from trainkit.errors import TrainkitError
from trainkit.lit.callback.table import show

CHECKED = ("train", "fit")
"""The commands that may stand behind it."""

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
    options = _parse(argv)
    say_loading("check", argv)
    from trainkit.lit.quiet import without_advice

    find_modules_here()
    door = cast(Door, options.words[0])
    folders = tempfile.TemporaryDirectory(prefix="trainkit-check-")
    with spoken(door), without_advice(), folders as folder:
        build = {"train": _of_train, "fit": _of_fit}[door]
        trainer, report = build(options.words[1:], folder, options.rows)
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
        aside = sys.stderr if options.json else sys.stdout
        print(f"trainkit | page: {page}", file=aside)
    return 0 if report.exact else 1


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Our own options, and behind them the `words` of the training."""
    place = next((n for n, word in enumerate(argv) if word in CHECKED), len(argv))
    parser = Arguments(prog="trainkit check", description=_ABOUT, epilog=_EXIT)
    parser.usage = "trainkit check [--json] [--html[=FILE]] [--rows N] train|fit ..."
    add = parser.add_argument
    add("--json", action="store_true", help="print the report as JSON")
    page = "write the report as a page too, without =FILE as check.html"
    html: Any = add("--html", nargs="?", const="check.html", metavar="FILE", help=page)
    few = "use at most so many rows (default 24)"
    add("--rows", type=int, default=24, metavar="N", help=few)
    words: Any = add("words", nargs="*", help="train or fit, and its words")
    words.completer, html.completer = lambda **_: CHECKED, lambda **_: ()
    options = parser.parse_args(argv[:place])
    check_whole_number("trainkit check --rows", options.rows, least=2)
    if options.words or place == len(argv):
        received = repr(options.words[0]) if options.words else "nothing"
        raise TrainkitError(
            f"trainkit check: must be followed by train or fit, and the words that one "
            f"would train with, received {received}. For example: trainkit check train "
            f"experiment=digits_bn"
        )
    for word in argv[place:]:
        if word.partition("=")[0] in ("--json", "--html", "--rows"):
            raise TrainkitError(
                f"trainkit check {word}: must stand before the word {argv[place]}, "
                f"since what follows is for the training."
            )
    options.words = list(argv[place:])
    return options


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


def _of_train(words: Sequence[str], folder: str, rows: int) -> tuple[Any, Any]:
    from omegaconf import open_dict

    from trainkit.cli.composition import Composition
    from trainkit.cli.runs.ranks import ranks_of_one_run
    from trainkit.config.build import build
    from trainkit.lit.front.check import check

    words = options_first(words)
    refuse_another_app(words)
    config = Composition(words).config
    with open_dict(config):
        config.paths.run_dir = folder
    training = build(config)
    with ranks_of_one_run(training.trainer):
        of = training.module, training.data
        report = check(*of, trainer=training.trainer, rows=rows)
    return training.trainer, report


def _of_fit(words: Sequence[str], folder: str, rows: int) -> tuple[Any, Any]:
    from trainkit.cli.fit.cli import without_running
    from trainkit.lit.front.check import check

    place = {"default_root_dir": folder}
    cli = without_running("trainkit check fit", words, trainer_defaults=place)
    report = check(cli.model, cli.datamodule, trainer=cli.trainer, rows=rows)
    return cli.trainer, report
