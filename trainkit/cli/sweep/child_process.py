"""What the processes of agents and trials have in common: environment and signals."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_OF_ANOTHER_RUN = ("WANDB_SERVICE", "WANDB_SWEEP_ID", "WANDB_RUN_ID", "WANDB_RESUME")

KILL_DELAY = "WANDB_AGENT_KILL_DELAY"
"""Seconds between SIGTERM and SIGKILL: a variable of W&B's agent."""


def environment() -> dict[str, str]:
    """This process's environment, with this Python's `python` and `trainkit` first."""
    env = {k: v for k, v in os.environ.items() if k not in _OF_ANOTHER_RUN}
    here = str(Path(sys.executable).parent)
    env["PATH"] = os.pathsep.join([here, env.get("PATH", os.defpath)])
    return env


def kill_delay() -> float:
    return float(os.environ.get(KILL_DELAY, 30))  # the agent's own default


@contextmanager
def noted_signals() -> Iterator[list[int]]:
    """SIGINT and SIGTERM inside a `with` block, as a list that a loop can check."""
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
