"""A check whether a value has the type that a signature asks for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

_STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True)


def fits(value: Any, hint: Any) -> bool:
    """Whether a value has a type, without any conversion.

    A list may stand for a tuple or a set, and a text for a path, as YAML has neither.

    Args:
        value: a plain value, without nodes of a configuration.
        hint: a type. A value fits if its type cannot be checked.

    >>> fits(8, int), fits("8", int), fits("8", int | str)
    (True, False, True)
    >>> fits([1, 2], tuple[int, int]), fits([1, "2"], list[int])
    (True, False)
    """
    try:
        adapter = _adapter(hint)
    except Exception:  # of pydantic, which knows no such type, or of the type's module
        return True
    try:
        adapter.validate_python(value)
    except ValidationError:
        return _fits_as_json(value, adapter)
    except TypeError:  # isinstance refuses the type
        return True
    return True


def has_text(value: Any) -> bool:
    """Whether a value is a text or holds one.

    >>> has_text("8"), has_text([1, ["2"]]), has_text([1, 2])
    (True, True, False)
    """
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    return any(map(has_text, value)) if isinstance(value, list) else type(value) is str


def _adapter(hint: Any) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(hint, config=_STRICT)
    except Exception:  # a dataclass or a model has a configuration of its own
        return TypeAdapter(hint)


def _fits_as_json(value: Any, adapter: TypeAdapter[Any]) -> bool:
    if isinstance(value, Mapping) and any(map(_is_json, value)):
        return False  # in JSON a key that is a number is a text
    try:
        adapter.validate_json(json.dumps(value), strict=True)
    except (TypeError, ValueError):  # of either; a ValidationError is a ValueError
        return False
    return True


def _is_json(key: Any) -> bool:
    """Whether a key is a text that stands for a number, true, false or null."""
    try:
        json.loads(key)
    except (TypeError, ValueError):
        return False
    return True
