"""The Lightning CLI's parser, with one short message for a mistake."""

from __future__ import annotations

import difflib
import re
from typing import Any, NoReturn

from lightning.pytorch.cli import LightningArgumentParser

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
        if "'_target_'" in message:
            return [
                "In a file for the Lightning CLI class_path and init_args describe an "
                "object; _target_ is for trainkit train."
            ]
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
