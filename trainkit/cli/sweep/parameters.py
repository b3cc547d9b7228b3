"""The parameters of a sweep file: their names and their values."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from trainkit.cli.sweep.distributions import check_distribution, is_number
from trainkit.errors import TrainkitError

_SINGLE = ("min", "max", "mu", "sigma", "a", "b", "q")
_NUMBERS = ("value", "values", "probabilities", *_SINGLE)
_KEYS = (*_NUMBERS, "distribution", "parameters")
_LARGEST_WHOLE = 2**53
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


def leaves(
    parameters: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each parameter that has values, nested or not, with its dotted name.

    >>> dict(leaves({"a": {"value": 1}, "b": {"parameters": {"c": {"values": [2]}}}}))
    {'a': {'value': 1}, 'b.c': {'values': [2]}}
    """
    for name, parameter in parameters.items():
        if isinstance(parameter, Mapping) and "parameters" in parameter:
            yield from leaves(parameter["parameters"], f"{prefix}{name}.")
        else:
            yield prefix + str(name), parameter


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


def check_parameters(parameters: Any, *, method: str, where: str) -> None:
    """Refuse values that W&B would accept silently and then misread."""
    if not isinstance(parameters, Mapping) or not parameters:
        raise TrainkitError(
            f"{where} parameters: must be a mapping of names to values, "
            f"received {parameters!r}. Write, for example, parameters: "
            f"{{optimizer.lr: {{values: [0.1, 0.01]}}}}."
        )
    for name, parameter in parameters.items():
        place = f"{where} parameters.{name}"
        _check_name(name, place)
        if not isinstance(parameter, Mapping):
            raise TrainkitError(
                f"{place}: must be a mapping, received {parameter!r}. Write {name}: "
                f"{{value: {parameter}}} for one value, or {{values: [...]}}."
            )
        _check_keys(parameter, place)
        if "parameters" in parameter:
            check_parameters(parameter["parameters"], method=method, where=place)
        else:
            _check_numbers(parameter, place)
            _check_range(parameter, place)
            check_distribution(parameter, method=method, place=place)


def _check_name(name: Any, place: str) -> None:
    if isinstance(name, str) and _NAME.fullmatch(name):
        return
    bare = str(name).lstrip("+~")
    raise TrainkitError(
        f"{place}: W&B takes letters, digits, _, - and points in a name, received "
        f"{name!r}. Write {bare!r} if it is a key of the configuration. Keys that "
        f"Hydra adds or deletes belong in `command`, before ${{args_no_hyphens}}."
    )


def _check_keys(parameter: Mapping[str, Any], place: str) -> None:
    unknown = [key for key in parameter if key not in _KEYS]
    if unknown:
        raise TrainkitError(
            f"{place}: must have only the keys {', '.join(_KEYS)}, received "
            f"{unknown[0]!r}."
        )
    is_drawn = "distribution" in parameter and "value" not in parameter
    if not is_drawn and not {"value", "values", "min", "parameters"} & set(parameter):
        raise TrainkitError(
            f"{place}: must have values, received {dict(parameter)!r}. Give it value, "
            f"values, min and max, or parameters."
        )
    values = parameter.get("values")
    if "values" in parameter and (not isinstance(values, list) or not values):
        raise TrainkitError(
            f"{place}.values: must be a list that is not empty, received {values!r}."
        )


def _check_numbers(parameter: Mapping[str, Any], place: str) -> None:
    for key in _NUMBERS:
        given = parameter.get(key)
        for value in given if isinstance(given, list) else [given]:
            if isinstance(value, str) and (fixed := number_for_yaml(value)):
                raise TrainkitError(
                    f"{place}.{key}: {value} looks like a number, and YAML reads it as "
                    f"the string {value!r}. Write {fixed}."
                )
    for key in _SINGLE:
        value = parameter.get(key, 0)
        if not is_number(value):
            raise TrainkitError(f"{place}.{key}: must be a number, received {value!r}.")


def _check_range(parameter: Mapping[str, Any], place: str) -> None:
    if not {"min", "max"} <= set(parameter):
        return
    low, high = parameter["min"], parameter["max"]
    if not low < high:
        raise TrainkitError(f"{place}: min must be below max, received {low}, {high}.")
    distribution = str(parameter.get("distribution", ""))
    # https://docs.wandb.ai/guides/sweeps: log_uniform's bounds are exponents of e.
    if distribution in ("log_uniform", "q_log_uniform") and 0 < low and high <= 1:
        raise TrainkitError(
            f"{place}: {distribution} takes exponents of e, so min {low} and max "
            f"{high} mean {math.exp(low):.4g} to {math.exp(high):.4g}. Write "
            f"distribution: {distribution}_values for bounds of the value itself."
        )
    if distribution.endswith("log_uniform_values") and low <= 0:
        raise TrainkitError(
            f"{place}: {distribution} needs min above 0, received {low}."
        )
