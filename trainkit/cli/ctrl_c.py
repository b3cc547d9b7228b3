"""A Ctrl+C that nothing can swallow while a command begins."""

from __future__ import annotations

import signal
from typing import Any


class RememberedCtrlC:
    """Raises KeyboardInterrupt, and keeps the signal as `heard`.

    Python drops what is raised while it collects garbage, and a library that is being
    imported may catch it and then fail in another way. The callback that stops runs
    takes over what was heard.
    """

    heard = 0

    def __call__(self, number: int, frame: Any) -> None:
        self.heard = number
        raise KeyboardInterrupt


def ctrl_c_was_heard() -> bool:
    """Whether it has come since `remember_ctrl_c`, even if the command continued."""
    return bool(getattr(signal.getsignal(signal.SIGINT), "heard", 0))


def remember_ctrl_c() -> None:
    """Handle SIGINT from now on, unless it is ignored or handled already."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, RememberedCtrlC())
