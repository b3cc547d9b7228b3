"""Options as users write them: numbers and words are checked, and named if refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real

from trainkit.errors import TrainkitError

LARGEST = 10**12


def is_whole_number(value: object, *, least: int = 1) -> bool:
    """Whether a value is a whole number of at least `least`; a bool is not one."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    return is_int and least <= value <= LARGEST  # type: ignore[operator]


def is_positive_number(value: object) -> bool:
    """Whether a value is a finite number above 0; a bool is not one."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return is_number and 0 < value < math.inf  # type: ignore[operator]


def check_whole_number(
    name: str, value: object, *, least: int = 1, hint: str = ""
) -> None:
    """Refuse a value that is not a whole number from `least` to 10**12.

    The option has the name that the user knows, and the hint says what to write.
    """
    if not is_whole_number(value, least=least):
        raise TrainkitError(
            f"{name}: must be a whole number from {least} to {LARGEST:,}, received "
            f"{value!r}. {hint}".rstrip()
        )


def check_whole_numbers(owner: str, **options: object) -> None:
    """Refuse an option of `owner` that is not a whole number of at least 1."""
    for name, value in options.items():
        check_whole_number(f"{owner} {name}", value)


def check_size(name: str, size: object) -> None:
    """Refuse a size of a batch that is not a positive number."""
    if not is_positive_number(size):
        raise TrainkitError(
            f"{name}: must be a positive number, received {size!r}. It is the number "
            f"of samples (or tokens) that one optimizer step sees."
        )


def check_choice(
    name: str, choice: object, choices: Sequence[str], *, or_else: str = ""
) -> None:
    """Refuse a word that is not one of the choices; `or_else` names other values."""
    if choice not in choices:
        raise TrainkitError(
            f"{name}: must be one of {list(choices)}{or_else}, received {choice!r}."
        )


def check_kind(
    name: str, value: object, kinds: type | tuple[type, ...], what: str
) -> None:
    """Refuse a value that is of none of the kinds; `what` says what to write."""
    if not isinstance(value, kinds):
        raise TrainkitError(f"{name}: must be {what}, received {value!r}.")


def brief(number: float) -> str:
    """A number as a person writes it.

    >>> brief(64.0), brief(0.2), brief(0.1 * 3), brief(12345.678), brief(64)
    ('64', '0.2', '0.3', '12,346', '64')
    """
    if abs(number) < 1e15 and number == int(number):
        return f"{int(number):,}"
    return f"{number:,.0f}" if abs(number) >= 9999.5 else f"{number:.4g}"
