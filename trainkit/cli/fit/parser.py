"""The Lightning CLI's parser: one short message for a mistake, and YAML for both doors.

As for jsonargparse and OmegaConf, `1e-4` is a number. A file may also hold

- `_target_` nodes, which are read as `class_path` nodes;
- `${...}`, which is resolved within its file, `${oc.env:NAME,default}` too;
- `???` (a value that must be given), which counts as not given.
"""

from __future__ import annotations

import difflib
import re
from typing import Any, NoReturn

import yaml
from jsonargparse import get_loader, set_loader
from lightning.pytorch.cli import LightningArgumentParser
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainkit.config.translate import to_class_path
from trainkit.errors import TrainkitError

MODE = "trainkit"
"""The `parser_mode` with which jsonargparse reads this YAML."""

# Lines of jsonargparse's messages about its own internals: an optional value is a
# union with None, and a nested option is an object.
_NOISE = re.compile(
    r"\s*(- )?(Does not validate against any|Subtypes: |Errors:|Given value type: "
    r"|Expected a <class 'NoneType'>|Given value: (NestedArg|Namespace)\()"
)
_NO_PATH = re.compile(r"\s*- Expected a path but [^\s/]+(?<!\.yaml)(?<!\.yml) either")


class TrainkitParser(LightningArgumentParser):
    """Lightning's parser, which answers a mistake with the choices, not with pages of
    usage.

    Attributes:
        hints: for each argument, a line on its values for messages about it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hints: dict[str, str] = {}

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """End with exit status 2, or raise `ArgumentError`, as jsonargparse does."""
        text = readable(message)
        for hint in [*self._hints(message), *self._close_options(message)]:
            if hint not in text:  # a sub-command's parser has passed the error here
                text += f"\n{hint}"
        if not self.exit_on_error:
            super().error(text, ex)
        self.exit(2, f"{self.prog}: {text}\n")

    def _hints(self, message: str) -> list[str]:
        if not self.hints:  # made by jsonargparse for a nested value
            return []
        key = re.search(r'Parser key "([\w.]+)"', message)
        path = re.search(r"given class_path '([\w.]+)'", message)
        is_absent = re.search(r"No module named|[Nn]o [\w. ]*attribute", message)
        if key and path and not is_absent:
            return [f"--{key[1]}.help={path[1]} describes its arguments."]
        return [
            hint
            for name, hint in self.hints.items()
            if re.search(rf'"{name}[".]|required: (.*[ .])?{name}\b', message)
        ]

    def _close_options(self, message: str) -> list[str]:
        unknown = re.search(r"[Uu]nrecognized arguments: (--[\w.]+)", message)
        if unknown is None:
            return []
        known = set(re.findall(r"--[\w.]+", self.format_usage()))
        close = difflib.get_close_matches(unknown[1], known, n=3)
        return [f"Did you mean {' or '.join(close)}?"] if close else []


def readable(message: str) -> str:
    """A message of jsonargparse's without the lines about its internals.

    >>> print(readable('''Parser key "trainer.max_epochs":
    ...   Does not validate against any of the Union subtypes
    ...   Subtypes: [<class 'int'>, <class 'NoneType'>]
    ...   Errors:
    ...     - Expected a <class 'int'>
    ...     - Expected a <class 'NoneType'>
    ...   Given value type: <class 'str'>
    ...   Given value: x'''))
    trainer.max_epochs:
        - Expected a int
      Given value: x
    """
    lines = [line for line in message.splitlines() if not _NOISE.match(line)]
    if len(lines) > 2:  # there is another reason than the path's
        lines = [line for line in lines if not _NO_PATH.match(line)]
    text = "\n".join(line for line in lines if line.strip())
    text = re.sub(r'Parser key "([^"]+)"', r"\1", text)
    return re.sub(r"<class '(?:[\w.]*\.)?(\w+)'>", r"\1", text).replace("typing.", "")


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
        return to_class_path(found)
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


# At import: a process of ddp_spawn gets its parser as a pickle.
set_loader(MODE, load, (TrainkitError,))
