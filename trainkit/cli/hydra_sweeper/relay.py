"""The command that W&B's agent runs for a trial of Hydra's sweeper.

The trial itself is a job of Hydra's launcher. So this process only tells the sweeper
that the agent has a trial, waits until the job has ended, and passes on the agent's
request to stop it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from types import FrameType

ADDRESS = "TRAINKIT_SWEEPER"
"""The environment variable with the sweeper's socket, which only its agents have."""

FOR_THE_JOB = (
    "WANDB_ENTITY",
    "WANDB_PROJECT",
    "WANDB_RUN_ID",
    "WANDB_SWEEP_ID",
    "WANDB_SWEEP_PARAM_PATH",
)
"""The variables that make a W&B run a trial of the sweep."""

STOP = b"stop\n"


def main() -> int:
    """Wait for a trial's job; status 1 if the sweeper has ended without it."""
    with socket.socket(socket.AF_UNIX) as sweeper:

        def ask_to_stop(signum: int, frame: FrameType | None) -> None:
            sweeper.sendall(STOP)

        signal.signal(signal.SIGTERM, ask_to_stop)
        try:
            sweeper.connect(os.environ[ADDRESS])
            about = {k: os.environ[k] for k in FOR_THE_JOB if k in os.environ}
            sweeper.sendall(json.dumps(about).encode() + b"\n")
            return 0 if sweeper.recv(1) else 1
        except OSError:
            return 1
