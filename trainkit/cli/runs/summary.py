"""How a run ended: `summary.json`, and the table after training."""

from __future__ import annotations

import math
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from trainkit import __version__
from trainkit.cli.runs import summary_rows
from trainkit.cli.runs.folder import RunFolder
from trainkit.config.build import Training
from trainkit.core.noise.advice import ADVICE, KEY, NOT_MEASURED, advice
from trainkit.core.noise.estimate import LEAST_BLOCKS
from trainkit.core.strategies import PerSample, PerToken, Uniform
from trainkit.lit.batch_size import find_effective_batch
from trainkit.lit.callback.base import find_callback, windows_of
from trainkit.lit.callback.table import show as show_rows
from trainkit.lit.logs.summary import PlainComparison, facts_of_windows
from trainkit.lit.noise import NoiseScale
from trainkit.lit.windows.callback import WindowCallback

_PACKAGES = ("torch", "lightning", "hydra-core", "wandb")


def collect(
    training: Training, config: DictConfig, folder: RunFolder, window: int | None
) -> dict[str, Any]:
    """The content of `summary.json`.

    Args:
        training: that has ended.
        config: of the run.
        folder: of the run.
        window: micro-batches of a full window at the last step; None before the first.
    """
    trainer = training.trainer
    metrics = {name: number(value) for name, value in trainer.callback_metrics.items()}
    checkpoint = folder.newest_checkpoint()
    return {
        "name": config.name,
        "metric": config.metric,
        "metrics": metrics,
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "windows": {
            name: number(fact) for name, fact in facts_of_windows(trainer).items()
        },
        "unit": unit_of_weights(trainer),
        "effective_batch": _effective_batch(trainer, window),
        "micro_batching": _micro_batching(trainer),
        "learning_rates": [
            number(group["lr"])
            for optimizer in trainer.optimizers
            for group in optimizer.param_groups
        ],
        "plain_accumulation": _plain(trainer),
        "run_dir": str(folder.path),
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "versions": {
            "trainkit": __version__,
            **{name: version(name) for name in _PACKAGES},
            "python": platform.python_version(),
        },
        "git_commit": git_commit(),
        **_noise(trainer),
    }


def show(facts: dict[str, Any], folder: RunFolder) -> None:
    """Print the table that ends a training."""
    files = sorted(
        each.name + "/" * each.is_dir()
        for each in folder.path.iterdir()
        if not each.name.startswith(".")
    )
    rows = summary_rows.rows(facts)
    new = [row for row in rows if not row[1].startswith(NOT_MEASURED)]  # said before
    show_written(new, folder.path, files)


def show_written(
    rows: Sequence[summary_rows.Row], path: Path, files: Sequence[str]
) -> None:
    """Print a table, and below it the files: in the table a path would be cut."""
    show_rows(list(rows))
    print(f"trainkit | written to: {path}: {', '.join(files)}", flush=True)


def git_commit(where: str | Path = ".") -> str | None:
    """The commit of the working directory, with `+` if files were changed, or None."""
    git = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    try:
        done = subprocess.run(
            git, cwd=where, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _effective_batch(trainer: Any, window: int | None) -> dict[str, Any] | None:
    """The effective batch of the last step; None where the loader has no batch size."""
    if trainer.train_dataloader is None:
        return None  # it ended before the data were loaded
    found = find_effective_batch(trainer, accumulate=window)
    if found is None:
        return None
    return {
        "micro_batch": found.micro_batch,
        "accumulate": int(found.accumulate),
        "replicas": found.replicas,
        "size": found.size,
        "unit": found.unit,
    }


def _micro_batching(trainer: Any) -> dict[str, Any] | None:
    """The limits under which loader batches were cut, or None if they were not."""
    windows = windows_of(trainer)
    if not isinstance(windows, WindowCallback) or windows.micro_batching is None:
        return None
    options, found = windows.micro_batching, windows.micro_batch_size
    limits = {"size": options.size, "tokens": options.tokens, "pool": options.pool}
    if windows.inside is None:
        return {**limits, "found": found}
    found = found if options.is_auto else None
    return {**limits, "found": found, "inside": windows.inside.names}


def _plain(trainer: Any) -> dict[str, float] | None:
    for callback in trainer.callbacks:
        if isinstance(callback, PlainComparison) and callback.deviation is not None:
            mean, largest = callback.deviation
            return {"mean": mean, "largest": largest}
    return None


def _noise(trainer: Any) -> dict[str, Any]:
    """The noise scale, if `NoiseScale` has measured it, and the lines about it."""
    measured = find_callback(trainer, NoiseScale)
    if measured is None:
        return {KEY: None, ADVICE: []}
    estimate = measured.estimate
    if estimate is not None:
        said = advice(estimate, unit_of_weights(trainer))
        return {KEY: estimate.facts(), ADVICE: said}
    fewest = LEAST_BLOCKS * measured.every_n_steps
    why = "no estimate: too few measured windows had several micro-batches"
    if measured.why_not:
        why = f"{NOT_MEASURED}{measured.why_not}"
    elif trainer.global_step < fewest:
        why = f"no estimate: it takes {fewest:,} steps or more"
    return {KEY: None, ADVICE: [("noise scale", why)]}


def unit_of_weights(trainer: Any) -> str:
    """What the weights of windows count; empty if it has no name."""
    windows = windows_of(trainer)
    strategy = None if windows is None else windows.strategy
    units = {PerToken: "tokens", PerSample: "samples", Uniform: "micro-batches"}
    return next((units[kind] for kind in units if isinstance(strategy, kind)), "")


def number(value: Any) -> float | None:
    """A number for JSON; None if it is not finite or a metric of several elements."""
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        return None
    number = float(value)
    return number if math.isfinite(number) else None
