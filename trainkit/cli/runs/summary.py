"""How a run ended: `summary.json`, and the table after training and in the report."""

from __future__ import annotations

import math
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from trainkit import __version__
from trainkit.cli.runs.folder import RunFolder
from trainkit.cli.runs.throughput import Throughput
from trainkit.config.build import Training
from trainkit.core.noise.advice import ADVICE, KEY, NOT_MEASURED, advice, short
from trainkit.core.noise.estimate import LEAST_BLOCKS
from trainkit.core.plan.effective_batch import EffectiveBatch
from trainkit.core.plan.options import brief
from trainkit.core.strategies import PerSample, PerToken, Uniform
from trainkit.lit.batch_size import find_effective_batch
from trainkit.lit.callback.base import find_callback, windows_of
from trainkit.lit.callback.table import Row
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
    plain = find_callback(trainer, PlainComparison)
    off = None if plain is None else plain.deviation
    speed = find_callback(trainer, Throughput)
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
        "plain_accumulation": off and dict(zip(("mean", "largest"), off, strict=True)),
        "run_dir": str(folder.path),
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "versions": {
            "trainkit": __version__,
            **{name: version(name) for name in _PACKAGES},
            "python": platform.python_version(),
        },
        "git_commit": git_commit(),
        **_noise(trainer),
        "throughput": None if speed is None else speed.facts(),
    }


def write(facts: dict[str, Any], folder: RunFolder) -> None:
    """Write `summary.json`: the facts of a run, and its table as the report has it."""
    table = rows(facts)
    batch = facts["effective_batch"]
    if batch is not None:
        names = ("micro_batch", "accumulate", "replicas", "unit")
        size = EffectiveBatch(**{name: batch[name] for name in names})
        table.append(("last step", str(size)))
    table.append(("time", f"{facts['seconds']:,.1f} s"))
    versions = [f"{name} {number}" for name, number in facts["versions"].items()]
    table.append(("versions", ", ".join(versions)))
    if facts["git_commit"]:
        table.append(("commit", facts["git_commit"]))
    folder.write_json(folder.SUMMARY, {**facts, "table": table})


def show(facts: dict[str, Any], folder: RunFolder) -> None:
    """Print the table that ends a training."""
    files = sorted(
        each.name + "/" * each.is_dir()
        for each in folder.path.iterdir()
        if not each.name.startswith(".")
    )
    new = [row for row in rows(facts) if not row[1].startswith(NOT_MEASURED)]
    show_written(new, folder.path, files)  # without what was said before


def show_written(rows: list[Row], path: Path, files: Sequence[str]) -> None:
    """Print a table, and below it the files: in the table a path would be cut."""
    show_rows(rows)
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
    return None if found is None else {**asdict(found), "size": found.size}


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


# ---- in words ------------------------------------------------------------------------


def rows(facts: dict[str, Any]) -> list[Row]:
    """The lines of the table after training."""
    found = [("training", f"{facts['status']} after {counted_steps(facts['steps'])}")]
    windows = facts["windows"]
    if windows:
        first, last = (_brief(windows[f"{name}_loss"]) for name in ("first", "last"))
        mean = windows["weight"] / windows["windows"]
        least, most = brief(windows["smallest"]), brief(windows["largest"])
        weight = f"{mean:,.0f} on average, from {least} to {most}"
        found += [("window/loss", f"{first} -> {last}"), ("window weight", weight)]
    tested = (facts.get("test") or {}).get("metrics", {})
    for name, value in {**facts["metrics"], **tested}.items():
        if value is not None and not name.startswith(("lr-", "window/")):
            found.append((name, f"{value:.4g}"))
    limits = facts["micro_batching"]
    if limits is not None:
        known = [f"{name}={limit}" for name, limit in limits.items() if limit]
        found.append(("micro-batches", ", ".join(known) or "auto"))
    if facts["learning_rates"]:
        rates = ", ".join(_brief(rate, 3) for rate in facts["learning_rates"])
        found.append(("learning rate", f"{rates} at the end"))
    plain = facts["plain_accumulation"]
    if plain is not None:
        off = (
            f"its gradients would have been off by {plain['mean']:.1%} of their size "
            f"in these windows, {plain['largest']:.1%} in the worst"
        )
        found.append(("plain accumulation", off))
    found += [(label, text) for label, text in facts.get("advice") or ()]
    if facts.get("throughput") is not None:
        found.append(("throughput", throughput_text(facts["throughput"])))
    return found


def counted_steps(steps: int) -> str:
    """The number of steps in words.

    >>> counted_steps(1), counted_steps(2000)
    ('1 optimizer step', '2,000 optimizer steps')
    """
    return f"{steps:,} optimizer step{'s' * (steps != 1)}"


def throughput_text(speed: dict[str, Any]) -> str:
    """The throughput of a run in words, without what is not known."""
    rates = {each: speed[f"{each}_per_second"] for each in ("samples", "tokens")}
    known = {unit: rate for unit, rate in rates.items() if rate is not None}
    known = known or {"steps": speed["steps_per_second"]}
    said = [f"{short(rate)} {unit}/s" for unit, rate in known.items()]
    if speed["padding"] is not None:
        said.append(f"{speed['padding']:.0%} padding")
    said.append(f"{speed['waiting']:.0%} of the time waiting for data")
    return ", ".join(said)


def _brief(number: float | None, digits: int = 4) -> str:
    return "not finite" if number is None else f"{number:.{digits}g}"
