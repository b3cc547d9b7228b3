"""`trainkit new`: make the folder of a training of one's own, from a template."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
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
    """Make the folder of the template and the recipe `lines`; return the status."""
    folder = _checked(Path(_parse(argv).folder))
    recipe = Path(str(files("trainkit.recipes")), "lines", "lines.py")
    try:
        compiled = shutil.ignore_patterns("__pycache__")
        shutil.copytree(
            _TEMPLATE,
            folder,
            ignore=compiled,
            copy_function=shutil.copyfile,
            dirs_exist_ok=True,
        )
        shutil.copyfile(recipe, folder / "lines.py")
        for path in filter(Path.is_file, folder.rglob("*")):
            text = path.read_text().replace("experiment=lines", "experiment=default")
            path.write_text(text.replace(_PROJECT, folder.resolve().name))
    except OSError as error:
        raise TrainkitError(
            f"trainkit new: {folder} cannot be written: {error}. Choose a folder that "
            f"can be made."
        ) from error
    shown = sorted(path.name + "/" * path.is_dir() for path in folder.iterdir())
    where = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    show([("new", f"{folder}: {', '.join(shown)}"), ("next", f"{where}trainkit train")])
    return 0


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
