"""Names of nested parameters, and numbers as YAML writes them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

_LARGEST_WHOLE = 2**53


def leaves(
    parameters: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each parameter that has values, nested or not, with its dotted name.

    >>> dict(leaves({"a": {"value": 1}, "b": {"parameters": {"c": {"values": [2]}}}}))
    {'a': {'value': 1}, 'b.c': {'values': [2]}}
    """
    for name, parameter in parameters.items():
        if "parameters" in parameter:
            yield from leaves(parameter["parameters"], f"{prefix}{name}.")
        else:
            yield prefix + name, parameter


def flatten(arguments: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A trial's arguments by dotted name.

    >>> flatten({"a": 1, "b": {"c": {"d": 2}}})
    {'a': 1, 'b.c.d': 2}
    """
    flat = {}
    for name, value in arguments.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def is_number(value: Any) -> bool:
    """Whether a value is a number, and not true or false."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def number_for_yaml(text: str) -> str | None:
    """A number in YAML's notation, from a string; None if the string is not a number.

    PyYAML, which W&B's client uses, reads YAML 1.1: a float needs a point, and its
    exponent a sign. It reads `1e-4` as a string.

    >>> number_for_yaml("1e-4"), number_for_yaml("64"), number_for_yaml("1E30")
    ('0.0001', '64', '1.0e+30')
    >>> number_for_yaml("adamw"), number_for_yaml("inf")
    (None, None)
    """
    import yaml

    try:
        number = float(text)
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    is_whole = number.is_integer() and abs(number) < _LARGEST_WHOLE
    return yaml.safe_dump(int(number) if is_whole else number).split()[0]
