"""The environment variables of a trial without a server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainkit.cli.sweep.environment import base
from trainkit.cli.sweep.trial import Trial
from trainkit.cli.sweep.whole_config import PARAMETERS

_FLUSH = "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL"


def offline(
    config: Mapping[str, Any], trial: Trial, folder: Path, *, group: str
) -> dict[str, str]:
    """The environment of a trial that logs to W&B on this disk.

    The client gets the arguments in a file, as from an agent, so that a program may
    also read `wandb.config`. There is no `WANDB_SWEEP_ID`: the server knows no such
    sweep when the run is uploaded. The group holds its trials together instead.
    """
    env = base()
    for key in ("project", "entity"):
        if config.get(key):
            env.setdefault(f"WANDB_{key.upper()}", str(config[key]))
    if config.get("early_terminate") is not None:
        env.setdefault(_FLUSH, "1")  # the default of 15 s comes too late for a stop
    env.update(
        {
            "WANDB_MODE": "offline",
            "WANDB_RUN_ID": trial.name,
            "WANDB_RUN_GROUP": group,
            "WANDB_DIR": str(folder),
            PARAMETERS: str(write_parameters(trial, folder)),
        }
    )
    return env


def write_parameters(trial: Trial, folder: Path) -> Path:
    """Write the file that gives the client the arguments, as agents do."""
    import yaml

    entries = {name: {"value": value} for name, value in trial.arguments.items()}
    path = folder / "arguments.yaml"
    path.write_text(yaml.safe_dump({"wandb_version": 1, **entries}), encoding="utf-8")
    return path
