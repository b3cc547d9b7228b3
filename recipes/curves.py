"""The metric of several runs against optimizer steps, as a picture.

    python recipes/curves.py masked_lm.png runs/masked runs/all runs/uniform

Each line has the name of its run's folder.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from omegaconf import OmegaConf


def curve(run: Path, metric: str) -> tuple[list[int], list[float]]:
    """The steps at which the metric was logged, and its values."""
    with (run / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get(metric)]
    return [int(row["step"]) for row in rows], [float(row[metric]) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the metric of runs.")
    parser.add_argument("picture", type=Path)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--metric", metavar="NAME", help="default: the runs' own")
    options = parser.parse_args()
    config: Any = OmegaConf.load(options.runs[0] / "config.yaml")
    metric = options.metric or config.metric
    figure = Figure(figsize=(7, 3.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for run, marker in zip(options.runs, "osv^Dx" * len(options.runs), strict=False):
        axes.plot(*curve(run, metric), marker=marker, label=run.name)
    axes.set(xlabel="optimizer step", ylabel=metric)
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(options.picture)


if __name__ == "__main__":
    main()
