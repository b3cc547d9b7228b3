"""The distributions from which W&B draws a parameter, and the keys of each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trainkit.errors import TrainkitError, did_you_mean

_BOUNDS = (("min", "max"), ())
_QUANTISED = (("min", "max"), ("q",))
DISTRIBUTIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "constant": (("value",), ()),
    "categorical": (("values",), ()),
    "categorical_w_probabilities": (("values", "probabilities"), ()),
    "int_uniform": _BOUNDS,
    "uniform": _BOUNDS,
    "q_uniform": _QUANTISED,
    "log_uniform": _BOUNDS,
    "log_uniform_values": _BOUNDS,
    "q_log_uniform": _QUANTISED,
    "q_log_uniform_values": _QUANTISED,
    "inv_log_uniform": _BOUNDS,
    "inv_log_uniform_values": _BOUNDS,
    "normal": ((), ("mu", "sigma")),
    "q_normal": ((), ("mu", "sigma", "q")),
    "log_normal": ((), ("mu", "sigma")),
    "q_log_normal": ((), ("mu", "sigma", "q")),
    "beta": ((), ("a", "b")),
    "q_beta": ((), ("a", "b", "q")),
}
"""The required and the optional keys of each distribution, from W&B's own schema in
the package `sweeps`."""

_IN_A_GRID = ("constant", "categorical", "int_uniform", "q_uniform")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_distribution(
    parameter: Mapping[str, Any], *, method: str, place: str
) -> None:
    """Refuse a distribution that W&B does not have, or keys that it does not take."""
    name = parameter.get("distribution", implied(parameter))
    if not isinstance(name, str) or name not in DISTRIBUTIONS:
        raise TrainkitError(
            f"{place}.distribution: must be one of {', '.join(DISTRIBUTIONS)}, "
            f"received {name!r}.{did_you_mean(name, DISTRIBUTIONS)}"
        )
    _check_keys(parameter, name, place)
    if name == "categorical_w_probabilities":
        _check_probabilities(parameter, place)
    bounds = [parameter.get("min", 0), parameter.get("max", 0)]
    if name == "int_uniform" and not all(isinstance(each, int) for each in bounds):
        raise TrainkitError(
            f"{place}: int_uniform takes whole numbers, received min {bounds[0]} and "
            f"max {bounds[1]}. Write distribution: uniform for numbers between them."
        )
    if method == "grid" and name not in _IN_A_GRID:
        _refuse_in_a_grid(parameter, name, place)


def implied(parameter: Mapping[str, Any]) -> str:
    """The distribution that W&B uses if a parameter names none.

    >>> implied({"values": [1, 2]}), implied({"min": 1, "max": 9})
    ('categorical', 'int_uniform')
    >>> implied({"min": 0.1, "max": 9}), implied({"value": 3})
    ('uniform', 'constant')
    """
    if "value" in parameter:
        return "constant"
    if "values" in parameter:
        weighted = "probabilities" in parameter
        return "categorical_w_probabilities" if weighted else "categorical"
    bounds = (parameter.get("min"), parameter.get("max"))
    return "int_uniform" if all(isinstance(b, int) for b in bounds) else "uniform"


def _check_keys(parameter: Mapping[str, Any], name: str, place: str) -> None:
    needed, more = DISTRIBUTIONS[name]
    given = [key for key in parameter if key != "distribution"]
    missing = [key for key in needed if key not in given]
    surplus = [key for key in given if key not in needed + more]
    if not missing and not surplus:
        return
    fitting = [
        other
        for other, (must, may) in DISTRIBUTIONS.items()
        if set(must) <= set(given) <= {*must, *may}
    ]
    hint = f" These keys fit distribution: {' or '.join(fitting)}." if fitting else ""
    raise TrainkitError(
        f"{place}: distribution {name} takes {', '.join(needed + more)}, received "
        f"{', '.join(given) or 'no key'}.{hint}"
    )


def _check_probabilities(parameter: Mapping[str, Any], place: str) -> None:
    values, given = parameter["values"], parameter["probabilities"]
    is_list = isinstance(given, list) and len(given) == len(values)
    if not is_list or not all(is_number(each) and 0 <= each <= 1 for each in given):
        raise TrainkitError(
            f"{place}.probabilities: must be a list of {len(values)} numbers from 0 to "
            f"1, one for each of values, received {given!r}."
        )
    if not math.isclose(sum(given), 1, rel_tol=1e-5):
        raise TrainkitError(
            f"{place}.probabilities: must sum to 1, received {given!r}, which sum to "
            f"{sum(given):g}."
        )


def _refuse_in_a_grid(parameter: Mapping[str, Any], name: str, place: str) -> None:
    given = f"distribution {name}"
    if "min" in parameter:
        given = f"min {parameter['min']} and max {parameter['max']}"
    if "probabilities" in parameter:
        given = f"probabilities {parameter['probabilities']!r}"
    raise TrainkitError(
        f"{place}: a grid needs values, received {given}. List them as values: [...], "
        f"or choose method: random or bayes."
    )
