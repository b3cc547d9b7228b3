"""A check whether a value has the type that a signature asks for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import yaml
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


def remedy_for_text(value: Any, hint: Any) -> str:
    """Advice about a text that stands for something of another type.

    >>> print(remedy_for_text("8", int)[:43])
    The text is not converted. Write it without
    """
    if value == (decoded := _decoded(value)) and not isinstance(value, str):
        return ""
    if fits(decoded, hint):
        return (
            "The text is not converted. Write it without quotes, or put "
            "${oc.decode:...} around its source."
        )
    return (
        "The text is not converted. An object, class or function is named by _target_; "
        "the last two with _partial_: true."
    )


def _adapter(hint: Any) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(hint, config=_STRICT)
    except Exception:  # a dataclass or a model has a configuration of its own
        return TypeAdapter(hint)


def _fits_as_json(value: Any, adapter: TypeAdapter[Any]) -> bool:
    if isinstance(value, Mapping) and {*map(_decoded, value)} != {*value}:
        return False  # in JSON a key that is a number is a text
    try:
        adapter.validate_json(json.dumps(value), strict=True)
    except (TypeError, ValueError):  # of either; a ValidationError is a ValueError
        return False
    return True


def _decoded(value: Any) -> Any:
    """A value whose texts are read as YAML, at any depth."""
    if isinstance(value, str):
        try:
            return yaml.safe_load(value)
        except yaml.YAMLError:
            return value
    if isinstance(value, Mapping):
        return {_decoded(key): _decoded(each) for key, each in value.items()}
    return [_decoded(each) for each in value] if isinstance(value, list) else value
