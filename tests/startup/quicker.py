"""What others do again for each Trainer and each composition, done once or left out."""

import functools
import importlib.metadata
import sys
from typing import Any


def make_quicker() -> None:
    """Change libraries so that thousands of tests in one process take less time."""
    # Every Trainer looks for callbacks in what is installed: 6 ms.
    importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)


def make_hydra_quicker() -> None:
    """Read YAML in C, and compose a job once: together two thirds of its time.

    Before each job Hydra composes its configuration to read `hydra.mode`. No test sets
    it; one that did would fail, since Hydra compares the mode with what it runs.
    """
    if "hydra" not in sys.modules:  # the tests at hand do not use it
        return
    import yaml
    from hydra._internal.hydra import Hydra

    def no_mode(self: Any, config_name: Any, overrides: Any) -> None: ...

    Hydra.get_mode = no_mode
    yaml.SafeLoader = yaml.CSafeLoader  # type: ignore[misc]
