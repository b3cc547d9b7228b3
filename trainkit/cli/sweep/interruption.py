"""SIGINT and SIGTERM as a list that a loop can check."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def noted_signals() -> Iterator[list[int]]:
    """The signals that come inside a `with` block; the program decides what to do."""
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_status(came: list[int]) -> int:
    """130 after SIGINT, 143 after SIGTERM, 0 without a signal."""
    return 128 + came[0] if came else 0
