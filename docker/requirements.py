"""Print trainkit's requirements, one a line, from its pyproject.toml.

    python requirements.py pyproject.toml recipes tensorboard    # with these extras

An image installs these in a layer before the sources, so that a change of the sources
does not change this layer.
"""

from __future__ import annotations

import sys
from pathlib import Path

import tomllib


def requirements(pyproject: str, extras: list[str]) -> list[str]:
    """The dependencies of a project and of some of its extras.

    Args:
        pyproject: the text of its pyproject.toml.
        extras: their names.

    Raises:
        SystemExit: the project has no such extra.
    """
    project = tomllib.loads(pyproject)["project"]
    optional = project["optional-dependencies"]
    unknown = [name for name in extras if name not in optional]
    if unknown:
        raise SystemExit(
            f"EXTRAS: must be names of {sorted(optional)}, separated by spaces, "
            f"received {unknown}."
        )
    return [*project["dependencies"], *(r for name in extras for r in optional[name])]


if __name__ == "__main__":
    path, *names = sys.argv[1:]
    print("\n".join(requirements(Path(path).read_text(), names)))
