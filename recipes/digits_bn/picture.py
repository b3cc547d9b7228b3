"""The table and picture of README.md, from the folders of runs.

python -m recipes.digits_bn.picture outputs/digits_bn_exact/multirun/*/*/
"""

from __future__ import annotations

import csv
import re
import statistics
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt

Curves = dict[str, list[list[float]]]
EARLY = 2  # epochs
BIG = "the big batch"


def read(runs: list[Path]) -> Curves:
    """For each policy, the accuracy after each epoch in each of its runs."""
    found: Curves = defaultdict(list)
    for run in runs:
        overrides = (run / "overrides.yaml").read_text()
        policy = re.search(r"batchnorm=(\w+)", overrides)
        name = policy[1] if policy else "exact"
        with (run / "metrics.csv").open() as file:
            rows = [row["val/accuracy"] for row in csv.DictReader(file)]
        curve = [float(value) for value in rows if value]
        found[BIG if "micro_batching.size=64" in overrides else name].append(curve)
    return found


def spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.1%} ({min(values):.1%} to {max(values):.1%})"


def draw(found: Curves, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    colors = mpl.colormaps["tab10"].colors  # type: ignore[attr-defined]
    for color, (policy, curves) in zip(colors, found.items(), strict=False):
        epochs = range(1, len(curves[0]) + 1)
        means = [statistics.mean(values) for values in zip(*curves, strict=True)]
        lows, highs = (
            [bound(values) for values in zip(*curves, strict=True)]
            for bound in (min, max)
        )
        dashes = "--" if policy == BIG else "-"
        axes.plot(epochs, means, dashes, color=color, marker=".", label=policy)
        axes.fill_between(epochs, lows, highs, color=color, alpha=0.12, linewidth=0)
    axes.set(
        title="BatchNorm policies, windows of 64 in fours (band: all seeds)",
        xlabel="epoch",
        ylabel="val/accuracy",
    )
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main() -> None:
    mpl.use("Agg")
    found = read([Path(run) for run in sys.argv[1:]])
    print(f"| mean (worst to best seed) | {EARLY} epochs | all |\n|---|---:|---:|")
    for policy, curves in found.items():
        early, late = ([curve[i] for curve in curves] for i in (EARLY - 1, -1))
        print(f"| {policy} | {spread(early)} | {spread(late)} |")
    draw(found, Path(__file__).with_name("digits_bn.png"))


if __name__ == "__main__":
    main()
