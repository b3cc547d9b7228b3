"""Trains the classes of a file of one's own: `python mine.py`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

from trainkit.cli.main import main
from trainkit.cli.words import key_of


def train_file(path: str, *words: str, **classes: str) -> NoReturn:
    """Run `trainkit train` with classes of the file, and exit with its status.

    At the end of the file `mine.py`, which has these two classes:

        if __name__ == "__main__":
            train_file(__file__, "trainer.max_epochs=3", model="Net", data="Rows")

    Args:
        path: the file, `__file__`.
        words: of the command line; the ones after `python mine.py` replace them.
        classes: the name of a class in the file for each group.
    """
    from trainkit.config import allow_targets

    file, given = Path(path).resolve(), sys.argv[1:]
    allow_targets(file.stem)  # Python has put the file's own folder first
    if given[:1] == ["train"]:  # another rank, with the whole command line
        sys.exit(main(given))
    is_here = file.is_relative_to(Path.cwd().resolve())
    place = file.relative_to(Path.cwd().resolve()) if is_here else Path(file.name)
    module = ".".join(place.with_suffix("").parts)
    own = [f"{group}._target_={module}.{name}" for group, name in classes.items()]
    taken = {key_of(word) for word in given}
    rest = [word for word in (*words, *own) if key_of(word) not in taken]
    if "ckpt_path" in taken and "ckpt_path=auto" not in given:
        rest = []  # a run that is resumed has words of its own
    sys.exit(main(["train", *rest, *given]))
