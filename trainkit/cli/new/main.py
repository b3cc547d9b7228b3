"""`trainkit new`: make the folder of a training of one's own, from a template."""

from __future__ import annotations

import argparse
import re
import shlex
from importlib.resources import files
from pathlib import Path

from trainkit.cli.console import Arguments
from trainkit.errors import TrainkitError
from trainkit.lit.callback.table import show

_ABOUT = """\
Make a folder with a module, its data and their configuration. There, `trainkit train`
trains it at once. Change the files one by one into your own.
"""
_EXAMPLE = """\
example:
  trainkit new my_project && cd my_project && trainkit train
"""

_TEMPLATE = Path(__file__).with_name("template")
_PROJECT = "my_project"
"""The name in the template that the folder's own replaces."""

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)


def main(argv: list[str]) -> int:
    """Make the folder, and return the exit status."""
    folder = _checked(Path(_parse(argv).folder))
    texts = contents(folder.resolve().name)
    try:
        for path, text in texts.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
    except OSError as error:
        raise TrainkitError(
            f"trainkit new: {folder} cannot be written: {error}. Choose a folder that "
            f"can be made."
        ) from error
    shown = sorted({path.partition("/")[0] + "/" * ("/" in path) for path in texts})
    where = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    show([("new", f"{folder}: {', '.join(shown)}"), ("next", f"{where}trainkit train")])
    return 0


def contents(project: str) -> dict[str, str]:
    """The text of each file of a new folder: the template, and the recipe `lines`.

    Args:
        project: the name of the folder, and of the folder of its runs.
    """
    paths = sorted(path for path in _TEMPLATE.rglob("*") if path.is_file())
    texts = {
        str(path.relative_to(_TEMPLATE)): path.read_text().replace(_PROJECT, project)
        for path in paths
        if path.suffix != ".pyc"
    }
    recipe = Path(str(files("trainkit.recipes")), "lines", "lines.py").read_text()
    return {
        **texts,
        "lines.py": recipe.replace("experiment=lines", "experiment=default"),
    }


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = Arguments(prog="trainkit new", description=_ABOUT, epilog=_EXAMPLE)
    about = "of the new folder, which is made: letters, digits, '_', '-' and '.'"
    parser.add_argument("folder", metavar="FOLDER", help=about)
    return parser.parse_args(argv)


def _checked(folder: Path) -> Path:
    name = folder.resolve().name
    if not _NAME.fullmatch(name):
        raise TrainkitError(
            f"trainkit new: the name must consist of letters, digits, '_', '-' and "
            f"'.', since folders of runs take it, received {name!r}."
        )
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise TrainkitError(
            f"trainkit new: must be a folder that is new or empty, received {folder}, "
            f"which has files. Choose another name."
        )
    return folder
