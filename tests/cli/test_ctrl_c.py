"""A Ctrl+C ends a command with 130, whatever it has interrupted."""

from __future__ import annotations

import contextlib
import signal

import pytest

from trainkit.cli.ctrl_c import remember_ctrl_c
from trainkit.cli.errors import guarded


@pytest.mark.parametrize(("remembers", "status"), [(True, 130), (False, 1)])
def test_an_error_that_a_swallowed_ctrl_c_has_caused_is_no_error(
    remembers: bool, status: int
) -> None:
    """As an import that numpy repeats, until there is a RecursionError."""

    def broken() -> int:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise RecursionError

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if remembers:
            remember_ctrl_c()
        assert guarded(broken) == status
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_command_that_ignores_ctrl_c_goes_on_ignoring_it() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        remember_ctrl_c()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
