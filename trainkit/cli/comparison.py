"""The table of runs that ends `trainkit train -m`, the best run first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from trainkit.cli.console import aligned
from trainkit.cli.runs.folder import RunFolder
from trainkit.cli.words import key_of
from trainkit.config.redact import redact_file

_FAILED = ".failed"
"""A file that marks a failed run, maybe of another process, until the table."""


class Comparison(Callback):
    """Notes what a multirun is, and which of its runs fail, in any process."""

    multirun: ClassVar[DictConfig | None] = None
    """The configuration of the multirun of this command, once it has begun."""
    num_failed: ClassVar[int] = 0
    """The number of failed runs in the last multirun; a sweeper may hide them."""
    is_empty: ClassVar[bool] = False
    """Whether the last multirun ended without any run, as `seed=range(1,1)` does."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        Comparison.multirun = config
        for path in _failures(config):  # left by a multirun that was killed
            path.unlink()

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        if config.hydra.mode is RunMode.MULTIRUN:
            _redact(config)  # first, since the run may be killed later

    def on_job_end(
        self, config: DictConfig, job_return: JobReturn, **kwargs: Any
    ) -> None:
        is_one_of_many = config.hydra.mode is RunMode.MULTIRUN
        if is_one_of_many and job_return.status is JobStatus.FAILED:
            Path(config.hydra.runtime.output_dir, _FAILED).touch()


@contextmanager
def compared_even_if_some_fail() -> Iterator[None]:
    """Print the table of a multirun, even if a failure or an interruption ends it."""
    Comparison.multirun = None
    Comparison.num_failed = 0
    Comparison.is_empty = False
    try:
        yield
    finally:
        if Comparison.multirun is not None:
            show(Comparison.multirun)


def some_failed() -> bool:
    """Whether a run of the multirun under way has failed."""
    return Comparison.multirun is not None and bool(_failures(Comparison.multirun))


def _failures(config: DictConfig) -> list[Path]:
    return list(Path(config.hydra.sweep.dir).absolute().rglob(_FAILED))


def _removed_if_empty(folder: Path) -> bool:
    """Whether a multirun's folder had none of a run; it is removed then."""
    if not folder.is_dir():
        return False
    found = list(folder.iterdir())
    if any(path.name != "multirun.yaml" for path in found):
        return False
    for path in found:
        path.unlink()
    folder.rmdir()
    return True


def show(config: DictConfig) -> None:
    """Print the table of a multirun, and how many of its runs have failed."""
    Comparison.is_empty = _removed_if_empty(Path(config.hydra.sweep.dir))
    _redact(config)
    failures = _failures(config)
    Comparison.num_failed = len(failures)
    for path in failures:
        path.unlink()
    where = Path(config.hydra.sweep.dir)
    runs = [RunFolder(path.parent) for path in where.rglob(RunFolder.OVERRIDES)]
    if runs:
        print("\n".join(table(runs, maximizes=config.mode == "max")), flush=True)
        print(f"trainkit | all runs: {where.absolute()}", flush=True)
    if failures:
        begun = {run.path for run in runs} | {
            path.parent.absolute() for path in failures
        }
        counted = f"{len(failures)} of {len(begun)} runs failed"
        print(f"trainkit | {counted}", flush=True)


def _redact(config: DictConfig) -> None:
    """Redact `multirun.yaml`, in which Hydra writes the whole command line."""
    written = Path(config.hydra.sweep.dir, "multirun.yaml")
    if written.is_file():
        redact_file(written)


def table(runs: Sequence[RunFolder], *, maximizes: bool = False) -> list[str]:
    """The lines of the table: what was swept, how each run ended, and its metric.

    Args:
        runs: the folders of the runs.
        maximizes: whether a larger metric is better.
    """
    summaries = [run.read_summary() for run in runs]
    overrides = [
        {key_of(word): word.partition("=")[2] for word in run.overrides()}
        for run in runs
    ]
    names = dict.fromkeys(name for each in overrides for name in each)
    swept = [name for name in names if len({each.get(name) for each in overrides}) > 1]
    metric = next((each["metric"] for each in summaries if each.get("metric")), None)
    rows = []
    for run, summary, values in zip(runs, summaries, overrides, strict=True):
        tested = (summary.get("test") or {}).get("metrics", {})
        value = {**(summary.get("metrics") or {}), **tested}.get(metric)
        cells = [
            run.path.name,
            *(values.get(name, "") for name in swept),
            str(summary.get("status", "did not end")),
            str(summary.get("steps", "")),
            "" if value is None else f"{value:.6g}",
        ]
        rows.append((value, cells))
    sign = -1 if maximizes else 1
    rows.sort(key=lambda row: (row[0] is None, sign * (row[0] or 0.0)))
    header = ["run", *swept, "training", "steps", metric or ""]
    return aligned([header, *(cells for _, cells in rows)])
