"""The environment variables of a trial."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_OF_ANOTHER_RUN = ("WANDB_SERVICE", "WANDB_SWEEP_ID", "WANDB_RUN_ID", "WANDB_RESUME")

KILL_DELAY = "WANDB_AGENT_KILL_DELAY"
"""Seconds between SIGTERM and SIGKILL; the agent's own variable, and its default."""


def base() -> dict[str, str]:
    """This process's environment, with this Python's `python` and `trainkit` first."""
    env = {k: v for k, v in os.environ.items() if k not in _OF_ANOTHER_RUN}
    here = str(Path(sys.executable).parent)
    env["PATH"] = os.pathsep.join([here, env.get("PATH", os.defpath)])
    return env


def kill_delay() -> float:
    return float(os.environ.get(KILL_DELAY, 30))
