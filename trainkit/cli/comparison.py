"""The table of runs that ends `trainkit train -m`, the best run first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from trainkit.cli.console import aligned
from trainkit.cli.runs.folder import RunFolder
from trainkit.cli.words import key_of
from trainkit.config.redact import redact_file


class Comparison(Callback):
    """Notes what a multirun is, and redacts the words that Hydra writes of it."""

    multirun: ClassVar[DictConfig | None] = None
    """The configuration of the multirun of this command, once it has begun."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        Comparison.multirun = config

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        if config.hydra.mode is RunMode.MULTIRUN:
            _redact(config)  # first, since the run may be killed later


@dataclass
class Compared:
    """What came of a multirun, once it has ended.

    Attributes:
        is_empty: whether it had no job, as `seed=range(1,1)` has none.
        num_unfinished: how many runs of the table did not finish.
    """

    is_empty: bool = False
    num_unfinished: int = 0


@contextmanager
def compared_even_if_some_fail() -> Iterator[Compared]:
    """Print the table of a multirun, even if a failure or an interruption ends it."""
    Comparison.multirun = None
    compared = Compared()
    try:
        yield compared
    finally:
        if Comparison.multirun is not None:
            show(Comparison.multirun, compared)


def show(config: DictConfig, compared: Compared) -> None:
    """Print the table of a multirun, and how many of its runs did not finish."""
    where = Path(config.hydra.sweep.dir)
    runs = [RunFolder(path.parent) for path in where.rglob(RunFolder.OVERRIDES)]
    if not runs:
        (where / "multirun.yaml").unlink(missing_ok=True)
        with suppress(OSError):  # a job has written there
            where.rmdir()
        compared.is_empty = not where.exists()
        return
    _redact(config)
    print("\n".join(table(runs, maximizes=config.mode == "max")), flush=True)
    print(f"trainkit | all runs: {where.absolute()}", flush=True)
    ends = [run.read_summary().get("status") for run in runs]
    compared.num_unfinished = len(ends) - ends.count("finished")
    if compared.num_unfinished:
        counted = f"{compared.num_unfinished} of {len(runs)} runs did not finish"
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
