"""The environment variables of a trial."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainkit.cli.sweep.trial import Trial
from trainkit.cli.sweep.whole_config import PARAMETERS, write_parameters

_FLUSH = "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL"
_OF_ANOTHER_RUN = ("WANDB_SERVICE", "WANDB_SWEEP_ID", "WANDB_RUN_ID", "WANDB_RESUME")

KILL_DELAY = "WANDB_AGENT_KILL_DELAY"
"""Seconds between SIGTERM and SIGKILL: a variable of W&B's agent."""

_MAX_INITIAL_FAILURES = "WANDB_AGENT_MAX_INITIAL_FAILURES"


def base() -> dict[str, str]:
    """This process's environment, with this Python's `python` and `trainkit` first."""
    env = {k: v for k, v in os.environ.items() if k not in _OF_ANOTHER_RUN}
    here = str(Path(sys.executable).parent)
    env["PATH"] = os.pathsep.join([here, env.get("PATH", os.defpath)])
    return env


def offline(config: Mapping[str, Any], trial: Trial, *, group: str) -> dict[str, str]:
    """The environment of a trial that logs to W&B on this disk.

    The client gets the arguments in a file, as from an agent, so that a program may
    also read `wandb.config`. `WANDB_SWEEP_ID` is not set, since the server will know no
    such sweep when the run is uploaded. The group holds the trials together instead.
    """
    env = base()
    for key in ("project", "entity"):
        if config.get(key):
            env.setdefault(f"WANDB_{key.upper()}", str(config[key]))
    if config.get("early_terminate") is not None:
        env.setdefault(_FLUSH, "1")  # the default of 15 s comes too late for a stop
    return env | {
        "WANDB_MODE": "offline",
        "WANDB_RUN_ID": trial.name,
        "WANDB_RUN_GROUP": group,
        "WANDB_DIR": trial.folder,
        PARAMETERS: str(write_parameters(trial.arguments, Path(trial.folder))),
    }


def kill_delay() -> float:
    return float(os.environ.get(KILL_DELAY, 30))  # the agent's own default


def max_initial_failures() -> int:
    """How many trials may crash before one has ended well."""
    return int(os.environ.get(_MAX_INITIAL_FAILURES, 3))
