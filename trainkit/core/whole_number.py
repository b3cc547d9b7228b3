"""The check that a value is a whole number."""

from __future__ import annotations

from trainkit.errors import TrainkitError

LARGEST = 10**12


def is_whole_number(value: object, *, least: int = 1) -> bool:
    """Whether a value is a whole number of at least `least`; a bool is not one."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    return is_int and least <= value <= LARGEST  # type: ignore[operator]


def check_whole_number(
    name: str, value: object, *, least: int = 1, hint: str = ""
) -> None:
    """Refuse a value that is not a whole number from `least` to 10**12.

    Args:
        name: the option, as the user knows it.
        value: the value received.
        least: the smallest value that is allowed.
        hint: a sentence for the message: what to write instead.

    Raises:
        TrainkitError: the value is not such a number.
    """
    if not is_whole_number(value, least=least):
        raise TrainkitError(
            f"{name}: must be a whole number from {least} to {LARGEST:,}, received "
            f"{value!r}. {hint}".rstrip()
        )
