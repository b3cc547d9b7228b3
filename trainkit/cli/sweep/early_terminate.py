"""The entry `early_terminate` of a sweep file: the keys of W&B's hyperband."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainkit.cli.sweep.distributions import is_number
from trainkit.core.plan.options import is_whole_number
from trainkit.errors import TrainkitError, did_you_mean

_COUNT = (is_whole_number, "a whole number from 1")
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "min_iter": _COUNT,
    "max_iter": _COUNT,
    "s": _COUNT,
    "eta": (lambda value: is_number(value) and value > 1, "a number above 1"),
    "strict": (lambda value: isinstance(value, bool), "true or false"),
}
_KEYS = ("type", *_RULES)


def check_early_terminate(rule: Any, *, where: str) -> None:
    """Refuse keys that W&B does not know and would ignore.

    Args:
        rule: the entry, or None.
        where: the file.
    """
    if rule is None:
        return
    place = f"{where} early_terminate"
    if not isinstance(rule, Mapping) or rule.get("type") != "hyperband":
        raise TrainkitError(
            f"{place}: type must be 'hyperband', the only one W&B has; received "
            f"{rule!r}. Write early_terminate: {{type: hyperband, min_iter: 3}}."
        )
    for key, value in rule.items():
        if key not in _KEYS:
            raise TrainkitError(
                f"{place}.{key}: must be one of the keys {', '.join(_KEYS)}, received "
                f"{key}: {value!r}.{did_you_mean(key, _KEYS)}"
            )
        fits, text = _RULES.get(key, (lambda _: True, ""))
        if not fits(value):
            raise TrainkitError(f"{place}.{key}: must be {text}, received {value!r}.")
    if "min_iter" not in rule and not {"max_iter", "s"} <= set(rule):
        raise TrainkitError(
            f"{place}: needs min_iter, or max_iter and s, counted in values of the "
            f"metric, received {dict(rule)!r}."
        )
