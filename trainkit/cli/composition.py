"""The training that words describe: of `trainkit train`, or behind `trainkit check`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trainkit.cli.console import Arguments
from trainkit.cli.door import Door, spoken
from trainkit.cli.words import (
    CONFIG_DIR,
    CONFIG_NAME,
    CONFIG_PATH,
    completed,
    find_modules_here,
    option,
    options_first,
    refuse_another_app,
)
from trainkit.errors import TrainkitError

LOOP = (
    "configuration: a file must not name itself in its defaults, and one does, maybe "
    "through others. A file of your own that has the name of one of trainkit's takes "
    "its place, so give it another name to build on it."
)
"""What is said of files that name each other in a circle."""


class Composition:
    """The configuration that a command line composes, as `config`.

    Args:
        words: what follows `trainkit train`, in the order of `options_first`. Only
            options that say where configurations are have an effect.
    """

    def __init__(self, words: Sequence[str]) -> None:
        from hydra import compose, initialize_config_dir, initialize_config_module
        from hydra.core.global_hydra import GlobalHydra

        from trainkit.config._compat import VERSION_BASE
        from trainkit.config.conf import found_first, register

        words = completed(words)
        register()
        name = option(words, CONFIG_NAME) or "train"
        folder, path = option(words, CONFIG_DIR), option(words, CONFIG_PATH)
        if folder is not None and path is None and name != "train":
            # Hydra does not look for a root configuration in hydra.searchpath.
            folder, path = None, folder
        GlobalHydra.instance().clear()
        with (
            found_first(folder),
            (
                initialize_config_module("trainkit.conf", **VERSION_BASE)
                if path is None
                else initialize_config_dir(str(Path(path).absolute()), **VERSION_BASE)
            ),
        ):
            try:
                overrides = [word for word in words if not word.startswith("-")]
                self.config: Any = compose(name, overrides)
            except RecursionError as error:
                raise TrainkitError(LOOP) from error


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

    words = options_first(words)
    refuse_another_app(words)
    config = Composition(words).config
    with open_dict(config):
        config.paths.run_dir = str(folder)
    return config
