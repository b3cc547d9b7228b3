"""How tests install packages: as `make` does, by uv, or by pip where that fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

INDEXES = {
    "PIP_FIND_LINKS": "--find-links",
    "PIP_INDEX_URL": "--default-index",
    "PIP_EXTRA_INDEX_URL": "--index",
}
"""What pip reads from variables, and the options of uv that say the same."""


def install(*words: str, python: str = sys.executable) -> bool:
    """Install packages for a Python; whether that went well.

    uv needs a tenth of pip's time. It may be missing, or find no index where pip.conf
    names one.
    """
    given = [
        word
        for name, option in INDEXES.items()
        for place in os.environ.get(name, "").split()
        for word in (option, place)
    ]
    uv = [str(Path(sys.executable).with_name("uv")), "pip", "install", *given]
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-compile"]
    commands = [[*uv, "--python", python, *words], [*pip, *words]]
    options: dict[str, Any] = {"stdout": subprocess.DEVNULL, "timeout": 250}
    return any(
        subprocess.run(command, **options).returncode == 0
        for command in commands
        if Path(command[0]).exists()
    )
