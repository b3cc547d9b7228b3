"""A check that plain arithmetic shares: is it a whole number?"""

from __future__ import annotations

from trainkit.errors import TrainkitError

LARGEST = 10**12


def check_whole_number(name: str, value: object) -> None:
    """Refuse what is no whole number from 1 to 10**12.

    Args:
        name: what the number is, as the user knows it.
        value: what was received; a bool is no number.

    Raises:
        TrainkitError: the value is not a whole number.
    """
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or not 1 <= value <= LARGEST:  # type: ignore[operator]
        raise TrainkitError(
            f"{name}: must be a whole number from 1 to {LARGEST:,}, received {value!r}."
        )
