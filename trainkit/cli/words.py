"""The words of a `trainkit train` command line, as Hydra reads them."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from trainkit.errors import TrainkitError

CONFIG_DIR, CONFIG_NAME, CONFIG_PATH = "--config-dir", "--config-name", "--config-path"
SEARCH_PATH = "hydra.searchpath"

OF_ONES_OWN = {"model", "data", "experiment", "model._target_", "data._target_"}
"""Who chooses one of them does not want the demo."""


def options_first(argv: Sequence[str]) -> list[str]:
    """A command line with its options first, each in one word with its value.

    Hydra refuses a line with overrides on both sides of an option.

    >>> options_first(["seed=1", "-cd", "my conf", "-m", "model=mine"])
    ['--multirun', '--config-dir=my conf', 'seed=1', 'model=mine']

    Raises:
        TrainkitError: it has an option that Hydra has not.
    """
    from trainkit.config._compat import hydra_arguments

    parser: Any = hydra_arguments()
    parser.error = _refuse_options
    given = vars(parser.parse_intermixed_args(argv))
    options: list[str] = []
    for action in parser._actions:
        value = given.get(action.dest)
        if action.option_strings and value not in (None, False):
            name = action.option_strings[0]
            options.append(name if value is True else f"{name}={value}")
    return [*options, *given["overrides"]]


def _refuse_options(message: str) -> NoReturn:
    raise TrainkitError(
        f"trainkit train: {message}. Settings have no dashes, as in "
        f"trainer.max_epochs=3; trainkit train --hydra-help lists the options."
    )


def option(argv: Sequence[str], name: str) -> str | None:
    """The value of an option in a command line that `options_first` has put in order.

    >>> option(["--config-dir=a=b", "seed=1"], "--config-dir")
    'a=b'
    """
    found = [word for word in argv if word.startswith(f"{name}=")]
    return found[-1].partition("=")[2] if found else None


def key_of(word: str) -> str:
    """The key of an override.

    >>> key_of("+trainer.devices=2"), key_of("~schedule"), key_of("--cfg")
    ('trainer.devices', 'schedule', '--cfg')
    """
    return word.partition("=")[0].lstrip("+~").partition("@")[0]


def quoted(path: Path | str | None) -> str:
    """A path or text as the value of an override; any character may be in it.

    >>> print(quoted("it's"), quoted("a\\\\b"), quoted("end\\\\"))
    'it\\'s' 'a\\b' 'end\\\\'
    """
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(str(path), Quote.single).with_quotes()


def unquoted(value: str) -> str:
    """The text that a value stands for; the inverse of `quoted`.

    >>> unquoted(quoted("it's here")), unquoted("it's here"), unquoted('"last"')
    ("it's here", "it's here", 'last')
    """
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        escaped = rf"(\\+)({value[0]}|$)"
        return re.sub(escaped, lambda m: "\\" * (len(m[1]) // 2) + m[2], value[1:-1])
    return value


def of_this_job() -> list[str]:
    """The arguments that repeat the current job: its overrides and config folders."""
    from hydra.core.hydra_config import HydraConfig

    hydra = HydraConfig.get()
    words = [] if hydra.job.config_name == "train" else [
        f"{CONFIG_NAME}={hydra.job.config_name}"
    ]  # fmt: skip
    for source in hydra.runtime.config_sources:
        if source.provider == "command-line":
            words.append(f"{CONFIG_DIR}={source.path}")
        elif source.provider == "main" and source.path != "trainkit.conf":
            package = "pkg://" if source.schema == "pkg" else ""
            words.append(f"{CONFIG_PATH}={package}{source.path}")
    words += [word for word in hydra.overrides.hydra if key_of(word) == SEARCH_PATH]
    return [*words, *hydra.overrides.task]


def completed(words: Sequence[str]) -> list[str]:
    """A command line with what it leaves out: the groups in `conf/` of the current
    folder, and its `experiment/default.yaml`; or else the demo, where neither a model
    nor data nor an experiment is chosen.

    Args:
        words: in the order of `options_first`.
    """
    words = [_from_here(word) for word in words]
    named = {word.partition("=")[0] for word in words}
    here = None if {CONFIG_DIR, CONFIG_PATH} & named else conf_in(Path())
    if here is not None:
        words.insert(0, f"{CONFIG_DIR}={here}")
    chosen = {key_of(word) for word in words}
    if {CONFIG_NAME, CONFIG_PATH, "experiment"} & chosen:
        return words
    if Path(option(words, CONFIG_DIR) or "", "experiment", "default.yaml").is_file():
        words.append("experiment=default")
    elif not OF_ONES_OWN & chosen:
        words.append("experiment=demo")
    return words


def conf_in(folder: Path) -> Path | None:
    """The groups in `conf/` of a folder, if it has some and they are not trainkit's."""
    from trainkit.config.conf import conf_dir

    found = (folder / "conf").absolute()
    return found if found.is_dir() and not found.samefile(conf_dir()) else None


def refuse_another_app(words: Sequence[str]) -> None:
    """Refuse to train in a folder with a `configs/` of another program: the demo, say.

    Who names a class or another place of configurations needs nothing of `configs/`.

    Args:
        words: in the order of `options_first`.

    Raises:
        TrainkitError: `configs/train.yaml` is there, and would not be read.
    """
    from trainkit.config.conf import of_another_program

    root = Path("configs", "train.yaml")
    places = {CONFIG_DIR, CONFIG_PATH, "model._target_"}
    if conf_in(Path()) is None and root.is_file():
        if not places & {key_of(word) for word in words}:
            raise of_another_program(root)


def _from_here(word: str) -> str:
    """The word with a path from the current folder: Hydra starts at trainkit's code."""
    name, equals, path = word.partition("=")
    if name != CONFIG_PATH or "://" in path:
        return word
    return f"{name}{equals}{Path(path).absolute()}"


def to_paste(words: Sequence[str]) -> str:
    """A command of trainkit as a line for any folder and any environment.

    The current folder is in it, where a run's modules and its `conf/` are found, and
    the program, which need not be on the `PATH`.
    """
    here, program = Path.cwd(), Path(sys.executable).with_name("trainkit")
    begin = [str(program)] if program.is_file() else [sys.executable, "-m", "trainkit"]
    begin[0] = begin[0].removeprefix(f"{here}{os.sep}")
    return f"cd {shlex.quote(str(here))} && {shlex.join([*begin, *words])}"


def find_modules_here() -> None:
    """Find modules in the current folder, as `python -m` does and a script does not."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
