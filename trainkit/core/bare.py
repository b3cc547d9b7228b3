"""Types and attributes of objects, read without running any code of theirs."""

from __future__ import annotations

from typing import Any


def is_a(value: Any, *kinds: type) -> bool:
    """`isinstance`, by the type alone; `__class__` may be a property that fails."""
    return issubclass(type(value), kinds)


def names_in(value: Any) -> Any:
    """What a module, a class or an object holds by name; None if it has no names."""
    kind = type if is_a(value, type) else object
    try:
        return kind.__getattribute__(value, "__dict__")
    except Exception:  # it has slots, or a property that fails
        return None
