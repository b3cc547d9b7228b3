"""The tables and the picture of README.md: every window, rule and seed.

    python -m recipes.batch_size.study runs/study

Trains those whose folder has no summary yet, two at a time, and then reads them all.
The rule `gain` has the noise scale of its seed's run at the reference window.
"""

from __future__ import annotations

import csv
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

WINDOWS = (8, 16, 32, 64, 128)
REFERENCE = 16
SEEDS = (1, 2, 3)
RULES = ("linear", "sqrt", "gain")
TARGETS = (2.1, 1.9)
Pairs = list[tuple[float, float]]

# ---- training ------------------------------------------------------------------------


def folder(root: Path, rule: str, window: int, seed: int) -> Path:
    """At the reference window all rules have the same rate, so it is one run."""
    name = "reference" if window == REFERENCE else f"{rule}-{window}"
    return root / f"seed-{seed}" / name


def train(root: Path, rule: str, window: int, seed: int) -> None:
    """Train one, with 2 to 8 micro-batches in a window, if it is not there yet."""
    where = folder(root, rule, window, seed)
    if (where / "summary.json").is_file():
        return
    words = [
        "experiment=batch_size",
        f"seed={seed}",
        f"data.batch_size={window}",
        f"micro_batching.size={max(4, window // 8)}",
        # One measured window for every 64 pieces, or for every 128 of them.
        f"callbacks.noise_scale.every_n_steps={max(1, 64 // window)}",
        f"paths.run_dir={where}",
        "report=false",
        "callbacks.plain=null",
        # It ends when it has passed the last target.
        "+callbacks.stop._target_=lightning.pytorch.callbacks.EarlyStopping",
        "+callbacks.stop.monitor=val/loss",
        f"+callbacks.stop.stopping_threshold={min(TARGETS) - 0.05}",
        "+callbacks.stop.patience=100",
    ]
    if window != REFERENCE:
        words.append(f"lr_scaling={rule}")
    if rule == "gain" and window != REFERENCE:
        summary = folder(root, rule, REFERENCE, seed) / "summary.json"
        measured = json.loads(summary.read_text())["noise_scale"]
        words.append(f"lr_scaling.noise_scale={measured['samples']}")
    print(f"window {window}, {rule}, seed {seed}", flush=True)
    subprocess.run(
        [sys.executable, "-m", "trainkit", "train", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        check=True,
    )


def train_all(root: Path) -> None:
    rest = [w for w in WINDOWS if w != REFERENCE]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda seed: train(root, "sqrt", REFERENCE, seed), SEEDS))
        jobs = [(rule, w, seed) for seed in SEEDS for w in rest for rule in RULES]
        list(pool.map(lambda job: train(root, *job), jobs))


# ---- reading -------------------------------------------------------------------------


@dataclass(frozen=True)
class Reached:
    """A run at the point where its validation loss is the target."""

    rule: str
    window: int
    seed: int
    target: float
    rate: float
    samples: float  # NaN if it has not come so far, and then all of these
    steps: float
    noise_scale_on_average: float
    noise_scale: float
    noise_scale_low: float
    noise_scale_high: float


def read(root: Path, rule: str, window: int, seed: int, target: float) -> Reached:
    where = folder(root, rule, window, seed)
    with (where / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    losses = [
        (float(row["step"]) * window, float(row["val/loss"]))
        for row in rows
        if row["val/loss"]
    ]
    samples = first_at(smoothed(losses), target)
    columns = [f"window/noise_scale{end}" for end in ("", "_low", "_high")]
    scales = [
        [float(row[column] or "inf") for column in columns]
        for row in rows
        if row[columns[0]] and float(row["step"]) * window <= samples
    ]
    average = statistics.mean(row[0] for row in scales) if scales else math.nan
    at_target = scales[-1] if scales else [math.nan] * 3
    rate = max(float(row["lr-Adam"]) for row in rows if row["lr-Adam"])
    steps = samples / window
    return Reached(
        rule, window, seed, target, rate, samples, steps, average, *at_target
    )


def smoothed(curve: Pairs) -> Pairs:
    """Each value as the mean of itself and its two neighbours."""
    values = [value for _, value in curve]
    return [
        (curve[i][0], statistics.mean(values[i - 1 : i + 2]))
        for i in range(1, len(curve) - 1)
    ]


def first_at(curve: Pairs, target: float) -> float:
    """Where a falling curve crosses the target, between two of its points.

    >>> first_at([(0, 3.0), (100, 2.0), (200, 1.0)], 1.5)
    150.0
    """
    for (x, y), (next_x, next_y) in zip(curve, curve[1:], strict=False):
        if next_y <= target < y:
            return x + (next_x - x) * (y - target) / (y - next_y)
    return math.nan


# ---- the critical batch --------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """(S / fewest_steps - 1)(E / fewest_samples - 1) = 1 for S steps and E samples.

    McCandlish et al. 2018 (arXiv 1812.06162). With S = E / window it is
    E = fewest_samples * (1 + window / critical).
    """

    critical: float  # fewest_samples / fewest_steps
    fewest_samples: float
    error: float  # root mean square of the relative error

    def samples(self, window: float) -> float:
        return self.fewest_samples * (1 + window / self.critical)


def fit(windows: Sequence[float], samples: Sequence[float]) -> Fit:
    """The curve with the least squares of relative errors; NaN is left out."""
    points = [p for p in zip(windows, samples, strict=True) if not math.isnan(p[1])]

    def at(critical: float) -> Fit:
        logs = [math.log(e / (1 + w / critical)) for w, e in points]
        return Fit(critical, math.exp(statistics.mean(logs)), statistics.pstdev(logs))

    if len(points) < 3:
        return Fit(math.nan, math.nan, math.nan)
    candidates = (2 ** (k / 50) for k in range(-100, 701))  # 1/4 to 16,384
    return min(map(at, candidates), key=lambda found: found.error)


# ---- tables and picture --------------------------------------------------------------


def spread(values: Sequence[float], shown: Callable[[float], str]) -> str:
    """The median, and all of them from the least to the largest."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return "not reached"
    fewer = "" if len(known) == len(values) else f", {len(known)} of {len(values)}"
    low, middle, high = (f(known) for f in (min, statistics.median, max))
    return f"{shown(middle)} ({shown(low)} to {shown(high)}{fewer})"


def median(values: Sequence[float]) -> float:
    """The median of those that are known; NaN without any."""
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if known else math.nan


class Found:
    """All runs at all targets."""

    def __init__(self, reached: Sequence[Reached]) -> None:
        self.reached = list(reached)

    def values(self, name: str, rule: str, window: int, target: float) -> list[float]:
        """One for each seed."""
        return [
            getattr(each, name)
            for each in self.reached
            if (each.rule, each.window, each.target) == (rule, window, target)
        ]

    def fits(self, rule: str, target: float) -> list[Fit]:
        """One for each seed."""
        columns = [self.values("samples", rule, w, target) for w in WINDOWS]
        return [fit(WINDOWS, seed) for seed in zip(*columns, strict=True)]

    def print_windows(self, target: float) -> None:
        others = [rule for rule in RULES if rule != "gain"]
        heads = [f"samples, `{rule}`" for rule in RULES]
        heads += [f"`gain` / `{rule}`" for rule in others]
        print(f"\n| window, to {target} | {' | '.join(heads)} |")
        print("|---:" * (len(heads) + 1) + "|")
        for window in WINDOWS:
            samples = {r: self.values("samples", r, window, target) for r in RULES}
            cells = [spread(each, "{:,.0f}".format) for each in samples.values()]
            for rule in others:
                pairs = zip(samples["gain"], samples[rule], strict=True)
                ratios = [a / b for a, b in pairs]
                is_one = window == REFERENCE
                cells.append("" if is_one else spread(ratios, "{:.2f}".format))
            print(f"| {window} | {' | '.join(cells)} |")

    def print_scales(self) -> None:
        print("\n| to val/loss |", " | ".join(map(str, TARGETS)), "|")
        print("|---|---:|---:|")
        for rule in RULES:
            for name, title, shown in (
                ("critical", "critical batch that the runs show", "{:.0f}".format),
                ("error", "how far they are off its curve", "{:.0%}".format),
            ):
                cells = [
                    spread([getattr(each, name) for each in self.fits(rule, t)], shown)
                    for t in TARGETS
                ]
                print(f"| {title}, `{rule}` | {' | '.join(cells)} |")
        for window in WINDOWS:
            for name, title in (
                ("noise_scale_on_average", "on average up to there"),
                ("noise_scale", "there"),
            ):
                cells = [
                    spread(self.values(name, "sqrt", window, t), "{:.0f}".format)
                    for t in TARGETS
                ]
                row = f"noise scale {title}, window {window}"
                print(f"| {row} | {' | '.join(cells)} |")

    def draw(self, path: Path, target: float) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8.4, 4.1), dpi=110, layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        colors = dict(zip(RULES, ("#8c8c40", "#c44e52", "#4c72b0"), strict=True))
        for axes, name in ((left, "samples"), (right, "steps")):
            for rule, color in colors.items():
                shift = 1.05 ** (RULES.index(rule) - 1)
                found = [self.values(name, rule, w, target) for w in WINDOWS]
                for seed in zip(*found, strict=True):
                    at = [w * shift for w in WINDOWS]
                    axes.plot(at, seed, "o", color=color, ms=4, alpha=0.6, mew=0)
                middle = [median(each) for each in found]
                axes.plot(WINDOWS, middle, color=color, label=rule)
                critical = median([e.critical for e in self.fits(rule, target)])
                label = f"critical batch, {rule}"
                axes.axvline(critical, color=color, ls="--", lw=1, label=label)
            ends = [
                self.values(f"noise_scale_{end}", "sqrt", REFERENCE, target)
                for end in ("low", "high")
            ]
            axes.axvspan(
                min(ends[0]),
                max(ends[1]),
                color="#8c8c8c",
                alpha=0.25,
                lw=0,
                label=f"noise scale, window {REFERENCE}",
            )
            axes.set(xlabel="window, samples", ylabel=name, xscale="log", yscale="log")
            axes.set_xticks(WINDOWS, labels=[str(w) for w in WINDOWS])
            ticks = [m * 10**k for k in range(6) for m in (1, 2, 5)]
            low, high = axes.get_ylim()
            ticks = [tick for tick in ticks if low < tick < high]
            axes.set_yticks(ticks, labels=[f"{tick:,}" for tick in ticks])
            axes.minorticks_off()
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
        figure.suptitle(f"To val/loss {target}: medians, and each of three seeds")
        handles, labels = left.get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=3, frameon=False
        )
        figure.savefig(path)


def main() -> None:
    (root,) = map(Path, sys.argv[1:])
    train_all(root)
    reached = [
        read(root, rule, window, seed, target)
        for target in TARGETS
        for rule in RULES
        for window in WINDOWS
        for seed in SEEDS
    ]
    with (root / "study.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(vars(reached[0])))
        writer.writeheader()
        writer.writerows(vars(each) for each in reached)
    found = Found(reached)
    for target in TARGETS:
        found.print_windows(target)
    found.print_scales()
    found.draw(Path(__file__).with_name("batch_size.png"), TARGETS[-1])


if __name__ == "__main__":
    main()
