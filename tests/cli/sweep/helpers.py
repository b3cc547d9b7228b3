"""What the tests of sweeps share: toy sweeps, and the command in a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.startup import ended, forked
from trainkit.cli.sweep.sweep_file import SweepFile

TOY = str(Path(__file__).parent / "toy_trial.py")
REPOSITORY = Path(__file__).parents[3]
LR = {"values": [0.1, 0.01, 0.001]}


def toy(folder: Path, parameters: Mapping[str, Any], **config: Any) -> Path:
    """Write a sweep of toy trials; constants may be given as they are."""
    items = parameters.items()
    written = {n: v if isinstance(v, Mapping) else {"value": v} for n, v in items}
    content = {
        "program": TOY,
        "method": "grid",
        "metric": {"name": "val/loss", "goal": "minimize"},
        "parameters": written,
        "command": ["${env}", "${interpreter}", "${program}", "${args_no_hyphens}"],
        **config,
    }
    path = folder / "toy.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def offline(path: Path, say: Callable[[str], None] = print) -> Any:
    """A sweep in this process, new or continued."""
    from trainkit.cli.sweep.offline import OfflineSweep

    folder = path.parent / "sweeps" / "s1"
    folder.mkdir(parents=True, exist_ok=True)
    return OfflineSweep(SweepFile.read(path), folder, seed="7", say=say)


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "trainkit", "sweep", *words]


def run(
    words: list[str], env: Mapping[str, str], cwd: Path
) -> subprocess.CompletedProcess[str]:
    return ended(words, cwd, env, timeout=280)


def private_env(home: Path) -> dict[str, str]:
    """The environment of a user without an account."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    return {**env, "HOME": str(home), **forked()}


def read_trials(folder: Path) -> list[dict[str, Any]]:
    """The trials of the one sweep in a folder of sweeps, as another process sees it."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*/*-*.json"))]


def by_lr(trials: list[Any]) -> dict[float, Any]:
    return {trial.arguments["lr"]: trial for trial in trials}
