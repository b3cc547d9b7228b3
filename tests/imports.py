"""Which module of trainkit imports which, read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
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
        name: {found for found in _imported_by(path) if found in modules} - {name}
        for name, path in modules.items()
    }


def _imported_by(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{each.name}" for each in node.names)


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
