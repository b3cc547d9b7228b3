"""The runs of a sweep on this disk, for a server that does not answer."""

from __future__ import annotations

from pathlib import Path

from trainkit.cli.sweep.rows import metric_values, read_run, run_files
from trainkit.cli.sweep.trial import Trial
from trainkit.cli.sweep.whole_config import read_parameters


def local_trials(folder: Path, sweep_id: str, *, metric: str | None) -> list[Trial]:
    """The trials that agents have started with a folder as `WANDB_DIR`."""
    started = sorted(folder.glob(f"wandb/sweep-{sweep_id}/config-*.yaml"))
    return [_trial(folder, path, metric) for path in started]


def _trial(folder: Path, parameters: Path, metric: str | None) -> Trial:
    name = parameters.stem.removeprefix("config-")
    files = run_files(folder, name) or _of_train(name)
    rows, exit_code = read_run(files)
    trial = Trial(
        name=name,
        arguments=read_parameters(parameters),
        metric=metric_values(rows, metric),
        num_rows=len(rows),
        exit_code=exit_code,
        folder=str(files[-1].parent) if files else "",
        state="crashed" if exit_code else "finished",
    )
    if exit_code is None:
        trial.state, trial.note = "crashed", "it has not ended, or left no files here"
    return trial


def _of_train(name: str) -> list[Path]:
    """The files of a run of `trainkit train`, which W&B writes to the run's folder."""
    return sorted(Path.cwd().glob(f"outputs/*/*/wandb/*run-*-{name}/run-{name}.wandb"))
