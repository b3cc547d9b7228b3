"""Trains the classes of a file of one's own: `python mine.py`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from trainkit.cli.main import main
from trainkit.cli.runs.folder import RunFolder
from trainkit.cli.words import (
    CONFIG_DIR,
    CONFIG_PATH,
    conf_in,
    find_modules_here,
    key_of,
    unquoted,
)


def train_file(path: str, *words: str, **classes: str) -> NoReturn:
    """Run `trainkit train` with classes of the file, and exit with its status.

    A folder `conf/` beside the file is found from any current folder.

    At the end of the file `mine.py`, which has these two classes:

        if __name__ == "__main__":
            train_file(__file__, "trainer.max_epochs=3", model="Net", data="Rows")

    Args:
        path: the file, `__file__`.
        words: of the command line; the ones after `python mine.py` replace them.
        classes: the name of a class in the file for each group.
    """
    given = sys.argv[1:]
    if given[:1] == ["train"]:  # another rank, with the whole command line
        sys.exit(main(given))
    find_modules_here()
    file = Path(path).resolve()
    module = _name_of(file)
    own = [f"{group}._target_={module}.{name}" for group, name in classes.items()]
    taken = {key_of(word) for word in given}
    rest = [word for word in (*words, *own) if key_of(word) not in taken]
    rest = [] if _resumes_a_run(given) else rest
    sys.exit(main(["train", *_conf_beside(file, given), *rest, *given]))


def _conf_beside(file: Path, given: Sequence[str]) -> list[str]:
    """The option for the file's own `conf/`, unless another place is given."""
    conf = conf_in(file.parent)
    places = (CONFIG_DIR, CONFIG_PATH, "-cd", "-cp")
    is_given = any(word.startswith(places) for word in given)
    return [] if conf is None or is_given else [f"{CONFIG_DIR}={conf}"]


def _resumes_a_run(given: Sequence[str]) -> bool:
    """Whether a run is resumed, which has words of its own."""
    named = [word.partition("=")[2] for word in given if key_of(word) == "ckpt_path"]
    if not named or named[-1] == "last":
        return bool(named)
    path = Path(unquoted(named[-1])).expanduser().absolute()
    return RunFolder.around(path) is not None


def _name_of(path: Path) -> str:
    """The name by which the file can be imported from the current folder."""
    here = Path.cwd().resolve()
    if path.is_relative_to(here):
        name = ".".join(path.relative_to(here).with_suffix("").parts)
        if _origin_of(name) == path:
            return name
    # Python has put the file's own folder first.
    from trainkit.config import allow_targets

    allow_targets(path.stem)
    return path.stem


def _origin_of(name: str) -> Path | None:
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin).resolve() if spec and spec.origin else None
