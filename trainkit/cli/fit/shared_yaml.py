"""The YAML that `trainkit fit` reads, in Lightning's notation and in Hydra's.

As for jsonargparse and OmegaConf, `1e-4` is a number. A file may also hold

- `_target_` nodes, which are read as `class_path` nodes;
- `${...}`, which is resolved within its file, `${oc.env:NAME,default}` too;
- `???` (a value that must be given), which counts as not given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml
from jsonargparse import get_loader, set_loader
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainkit.config.translate import to_class_path
from trainkit.errors import TrainkitError

MODE = "trainkit"
"""The `parser_mode` with which jsonargparse reads this YAML."""

_MISSING = "???"


def register() -> None:
    """Register the mode with jsonargparse; a second call changes nothing."""
    set_loader(MODE, load, (TrainkitError,))


def load(text: str, path: str = "") -> Any:
    """Read a file, or a single value from the command line.

    >>> load("{lr: 1e-4, accumulation: {_target_: trainkit.Uniform}}")
    {'lr': 0.0001, 'accumulation': {'class_path': 'trainkit.Uniform'}}
    >>> load("{lr: 0.1, peak: '${lr}'}")
    {'lr': 0.1, 'peak': 0.1}

    Args:
        text: the file's text, or the value.
        path: the file, for the message.

    Raises:
        TrainkitError: it is not YAML, or its content cannot be resolved or
            translated.
    """
    place = f"{path}: " if path else ""
    try:
        found = get_loader("yaml")(text)
        if not isinstance(found, dict | list):
            return found
        if "${" in text:
            found = OmegaConf.to_container(OmegaConf.create(found), resolve=True)
        return to_class_path(_without_missing(found))
    except yaml.YAMLError as error:
        raise TrainkitError(
            f"{place}must be YAML, and cannot be read as YAML: {error}"
        ) from error
    except OmegaConfBaseException as error:
        raise TrainkitError(
            f"{place}{error.full_key or 'file'}: {str(error).splitlines()[0]}. In a "
            f"file that the Lightning CLI reads, ${{...}} may name an entry of that "
            f"file, or be ${{oc.env:NAME,default}}."
        ) from error
    except TrainkitError as error:
        raise TrainkitError(f"{place}{error}") from error


def _without_missing(node: Any) -> Any:
    if isinstance(node, Mapping):
        return {
            name: _without_missing(value)
            for name, value in node.items()
            if value != _MISSING
        }
    if isinstance(node, list):
        return [_without_missing(value) for value in node]
    return node
