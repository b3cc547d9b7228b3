"""Commands that end with the words of a training: `trainkit check ... train ...`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trainkit.cli.console import Arguments
from trainkit.cli.door import Door, spoken
from trainkit.cli.words import find_modules_here, options_first, refuse_another_app
from trainkit.errors import TrainkitError

TRAININGS = ("train", "fit")
"""The commands that may stand behind such a command."""


def words_behind(
    parser: Arguments, argv: Sequence[str], *, example: str
) -> tuple[Any, list[str]]:
    """The command's own options, and behind them the words of the training.

    Args:
        parser: with the options, to which the words of the training are added.
        argv: all words.
        example: the words of a training, for messages.
    """
    parser.add_argument("words", nargs="*", help="train or fit, and its words")
    place = next((n for n, word in enumerate(argv) if word in TRAININGS), len(argv))
    options = parser.parse_args(argv[:place])
    if options.words or place == len(argv):
        received = repr(options.words[0]) if options.words else "nothing"
        raise TrainkitError(
            f"{parser.prog}: must be followed by train or fit, and the words that one "
            f"would train with, received {received}. For example: {parser.prog} "
            f"{example}"
        )
    own = [name for each in parser._actions for name in each.option_strings]
    for word in argv[place:]:
        if word.partition("=")[0] in own and word not in ("-h", "--help"):
            raise TrainkitError(
                f"{parser.prog} {word}: must stand before the word {argv[place]}, "
                f"since what follows is for the training."
            )
    return options, list(argv[place:])


@contextmanager
def aside(door: Door) -> Iterator[str]:
    """Where a training is built but not run: Lightning gives no advice, errors speak in
    the words of the door, and what is written goes to a folder that is then removed."""
    from trainkit.lit.aside import without_advice

    find_modules_here()
    with spoken(door), without_advice(), TemporaryDirectory(prefix="trainkit-") as path:
        yield path


def built(command: str, words: Sequence[str], folder: str) -> tuple[Any, Any, Any]:
    """The Trainer, the module and the data of a training that is not run.

    Args:
        command: that asks.
        words: of the training.
        folder: for the files that it may write.
    """
    door, *words = words
    if door == "fit":
        from trainkit.cli.fit.cli import without_running

        place = {"default_root_dir": folder}
        cli = without_running(f"{command} fit", words, trainer_defaults=place)
        return cli.trainer, cli.model, cli.datamodule
    from trainkit.config.build import build

    training = build(composed(words, folder))
    return training.trainer, training.module, training.data


def composed(words: Sequence[str], folder: Path | str) -> Any:
    """The configuration of a `trainkit train`, whose run is in a given folder."""
    from omegaconf import open_dict

    from trainkit.cli.composition import Composition

    words = options_first(words)
    refuse_another_app(words)
    config = Composition(words).config
    with open_dict(config):
        config.paths.run_dir = str(folder)
    return config
