"""Small trainings that log to W&B, and what they left on the disk."""

from __future__ import annotations

import glob
import json
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from tests.helpers import TokenModule, loader, ragged_sequences, trainer
from tests.startup import ended, forked
from tests.wandb_server import Run, WandbServer
from trainkit import AccumulationCallback, PerToken, WindowMonitor

DATA = ragged_sequences(38)  # ten batches of four, the last of two
STEPS = 3
"""Windows of four of them, in an epoch."""


def connect(server: WandbServer, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """Log the client of this process in to the stand-in server.

    It sends rows when its run ends, since between two times it waits for a second."""
    env = server.env(home)
    del env["WANDB_X_FILE_STREAM_TRANSMIT_INTERVAL"]
    for name in env:
        if name.startswith("WANDB_") and name not in ("WANDB_DIR", "WANDB_PROJECT"):
            monkeypatch.setenv(name, env[name])


def fit(
    logger: Any, *callbacks: pl.Callback, epochs: int = 1, **options: Any
) -> pl.Trainer:
    """Three windows, each of them logged by WindowMonitor."""
    found = trainer(
        4,
        logger=logger,
        max_epochs=epochs,
        log_every_n_steps=1,
        callbacks=[AccumulationCallback(PerToken()), WindowMonitor(1), *callbacks],
        **options,
    )
    found.fit(TokenModule(), loader(DATA, 4))
    return found


def only_run(server: WandbServer) -> Run:
    (found,) = server.runs.values()
    return found


def folders(save_dir: Path) -> list[Path]:
    """The runs below a folder, the oldest first."""
    return [Path(p) for p in sorted(glob.glob(f"{save_dir}/wandb/*run-*-*"))]


def records(folder: Path) -> list[dict[str, Any]]:
    """What the client has written, as its own command reads it."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)]
    done = ended(command, Path())
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def rows(folder: Path) -> list[dict[str, Any]]:
    """The history of a run on the disk."""
    found = records(folder)
    return [each["history"]["item"] for each in found if each["type"] == "history"]


def sync(server: WandbServer, folder: Path, home: Path) -> None:
    """`wandb sync`, as a user would."""
    command = [sys.executable, "-m", "wandb", "sync", "--include-online", str(folder)]
    done = ended(command, home, server.env(home, **forked()))
    assert done.returncode == 0, done.stderr


def window_losses(history: list[dict[str, Any]]) -> list[float]:
    return [row["window/loss"] for row in history if "window/loss" in row]


def axes(metrics: list[dict[str, Any]]) -> dict[str, str]:
    """What is drawn over what. The client's numbers: 1 the name, 2 a name with a star,
    5 the x-axis as a place in this list, from 1."""
    return {
        each["2"]: metrics[each["5"] - 1]["1"]
        for each in metrics
        if "2" in each and "5" in each
    }
