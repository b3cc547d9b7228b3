"""Which module of trainkit imports which, read from the source."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import trainkit

ROOT = Path(trainkit.__file__).parent


def imports() -> dict[str, set[str]]:
    """For each module, those of trainkit that it imports, also for types alone.

    The packages' own files are left out: they name what they export, and load none.
    """
    modules = {
        ".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path
        for path in ROOT.rglob("*.py")
        if path.name != "__init__.py"
    }
    return {
        name: (_imported_by(path) & set(modules)) - {name}
        for name, path in modules.items()
    }


@functools.cache
def _imported_by(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{each.name}" for each in node.names)
    return found


def between_folders(package: str) -> dict[str, set[str]]:
    """For each folder of a package, or file that stands beside them, those it needs."""
    depth = package.count(".") + 1
    folders: dict[str, set[str]] = {}
    for name, needed in imports().items():
        if name.startswith(f"{package}."):
            own = folders.setdefault(name.split(".")[depth], set())
            own.update(
                other.split(".")[depth]
                for other in needed
                if other.startswith(f"{package}.")
            )
    return {folder: needed - {folder} for folder, needed in folders.items()}
