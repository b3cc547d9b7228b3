"""A recipe's debug experiment, run in this process."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from tests.cli.training import summary_of, the_run, train


def run_debug(name: str, where: Path, *overrides: str) -> dict[str, Any]:
    """Train `experiment=NAME_debug` in the current folder and return its metrics."""
    assert train(f"experiment={name}_debug", *overrides, small=QUICK) == 0
    run = the_run(where)
    with (run / "metrics.csv").open() as file:
        assert list(csv.DictReader(file))
    return summary_of(run)["metrics"]


QUICK = ["pictures=false", "callbacks.best=null"]
