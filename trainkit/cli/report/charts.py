"""The choice of charts for the columns of a run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from trainkit.cli.report.chart import Chart, Charts, Line
from trainkit.cli.report.noise_chart import HIGH, LOW, noise_chart
from trainkit.cli.report.noise_chart import KEYS as NOISE_KEYS
from trainkit.cli.report.series import WINDOW, Series
from trainkit.cli.report.throughput import RATES as THROUGHPUTS
from trainkit.cli.runs.summary_rows import three_digits

_LOSSES = ("train/loss", "train_loss", "train/loss_step", "train_loss_step")
"""The names of a loss without windows; the first one that was logged is drawn."""
_VALIDATION = re.compile(r"^(val|valid|validation)[/_](.*[/_])?loss(_epoch)?$")
_PHASES = ("train/", "val/", "valid/", "validation/", "test/")
_NOT_CHARTS = ("window/seen", "window/samples_seen")
_RATE = re.compile(r"^lr-(?!.*-(momentum|weight_decay)$)")
_SCALING = "lr_scaling/"
"""The columns of `LRScaling`, which logs a rate when it changes."""
_MOST_OTHERS = 12
METRIC = "metric_"
"""The beginning of the keys of charts for any other column."""
_LONGEST_KEY = 100
"""The longest key in characters; a file's name may have 255."""

_LOSS = Chart(
    "loss",
    "Loss",
    "The mean loss of each window over all ranks, and of each validation.",
    may_be_log=True,
)
_RATES = Chart(
    "learning_rate",
    "Learning rate",
    "What the optimizer used, and what was planned when the training began.",
    from_zero=True,
)
_WEIGHT = Chart(
    "weight",
    "Window weight",
    "How much each optimizer step counted, as the strategy weighs.",
    from_zero=True,
)
_THROUGHPUT = Chart(
    "throughput",
    "Throughput",
    "What was trained on in a second, without validations and checkpoints.",
    from_zero=True,
)
_OTHERS = (
    Chart(
        "imbalance",
        "Imbalance",
        "The largest share of a micro-batch times their number; 1 is even.",
    ),
    _RATES,
    Chart(
        "micro_batches",
        "Accumulation",
        "How many micro-batches, of all ranks, made a window.",
        from_zero=True,
        as_stairs=True,
    ),
    Chart(
        "grad_norm",
        "Gradient norm",
        "The 2-norm of the window's gradient, before clipping.",
        may_be_log=True,
    ),
    Chart(
        "padding",
        "Padding",
        "The share of tokens that only pad.",
        is_share=True,
        from_zero=True,
    ),
    Chart(
        "uniform_gap",
        "Uniform gap",
        "The share of weight that equal weights would have given to the wrong "
        "micro-batches: half the sum of |weight / window weight - 1 / micro-batches|.",
        is_share=True,
        from_zero=True,
        note="Plain accumulation gives equal weights. In a full window its gradient is "
        "off by at most twice this gap, times the distance from the window's gradient "
        "to the farthest one of a micro-batch: by nothing if all of them agree, by "
        "more than the gap if they are far apart.",
    ),
    Chart(
        "micro_batch_size",
        "Micro-batch size",
        "The limit of each micro-batch, which is found while the training runs.",
        from_zero=True,
        as_stairs=True,
    ),
)
_IF_THERE = ("micro_batch_size", *THROUGHPUTS.values())
"""The keys of charts that nobody misses."""
KEYS = {chart.key for chart in (_LOSS, _WEIGHT, *_OTHERS)}
KEYS |= {*THROUGHPUTS.values(), *NOISE_KEYS}
"""The keys of all charts that have a name of ours."""


def choose(
    columns: Mapping[str, Series],
    plan: Mapping[str, Series],
    *,
    why_no_plan: str = "",
    unit: str = "",
    optimizers: Mapping[str, str] | None = None,
    speed: Mapping[str, Any] | None = None,
) -> Charts:
    """Sort a run's columns into charts.

    Args:
        columns: the columns by their names.
        plan: the planned learning rates by the names of their columns.
        why_no_plan: the reason if there is no plan.
        unit: what weights count, if it has a name.
        optimizers: the names of several optimizers by the beginnings of their columns.
        speed: the throughput of all steps, as `throughput` gives it.
    """
    weight = replace(_WEIGHT, lines=_of_windows(columns, "weight"))
    if unit:
        caption = f"How many {unit} each optimizer step counted."
        weight = replace(weight, title=f"Window weight, in {unit}", caption=caption)
    charts = [
        replace(_LOSS, lines=_losses(columns), note=_skipped(columns)),
        weight,
        *_throughputs(columns, speed or {}),
        *(
            _rates(columns, plan, why_no_plan)
            if chart is _RATES
            else replace(chart, lines=_of_windows(columns, chart.key))
            for chart in _OTHERS
        ),
    ]
    used = {line.series.name for chart in charts for line in chart.lines}
    noise = noise_chart(columns)
    if noise is not None:
        charts.append(noise)
        used |= {noise.lines[0].series.name, LOW, HIGH}
    missing = [
        f"{chart.title.lower()} ({_column_of(chart)} was not logged)"
        for chart in charts
        if not chart.lines and chart.key not in _IF_THERE
    ]
    shown = [_named(chart, optimizers or {}) for chart in charts if chart.lines]
    others, too_many = _rest(columns, used)
    return Charts((*shown, *others), (*missing, *too_many))


def _lines(columns: Mapping[str, Series], names: Iterable[str]) -> tuple[Line, ...]:
    """A line for each name; all after the first one are dashed."""
    return tuple(
        Line(name, f"other{(place - 1) % 4 + 1}", columns[name], "dashed")
        if place
        else Line(name, "train", columns[name])
        for place, name in enumerate(names)
    )


def _of_windows(columns: Mapping[str, Series], key: str) -> tuple[Line, ...]:
    """One line for each optimizer."""
    of_key = re.compile(rf"^{WINDOW}(?:\d+/)?{key}$")
    return _lines(columns, sorted(filter(of_key.match, columns)))


def _losses(columns: Mapping[str, Series]) -> tuple[Line, ...]:
    known = [name for name in _LOSSES if name in columns][:1]
    lines = _of_windows(columns, "loss") or _lines(columns, known)
    validations = filter(_VALIDATION.match, columns)
    return (*lines, *(Line(n, "validation", columns[n]) for n in validations))


def _throughputs(
    columns: Mapping[str, Series], speed: Mapping[str, Any]
) -> Iterator[Chart]:
    for name, key in THROUGHPUTS.items():
        mean = speed.get(key)
        yield replace(
            _THROUGHPUT,
            key=key,
            title=f"Throughput, in {name}",
            lines=_lines(columns, [name] if name in columns else []),
            note=f"Over all steps: {three_digits(mean)} {name}." if mean else "",
        )


def _skipped(columns: Mapping[str, Series]) -> str:
    """A remark if there were windows between those that were logged."""
    seen, weight = columns.get(f"{WINDOW}seen"), columns.get(f"{WINDOW}weight")
    if seen is None or weight is None or seen.steps != weight.steps:
        return ""
    skipped = any(
        now - own > before + 0.5 * own
        for before, now, own in zip(
            seen.values, seen.values[1:], weight.values[1:], strict=False
        )
    )
    return skipped * (
        "Between these points are windows that were not logged. "
        "callbacks.monitor.every_n_steps=1 logs all of them."
    )


def _rates(
    columns: Mapping[str, Series], plan: Mapping[str, Series], why_no_plan: str
) -> Chart:
    lines: list[Line] = []
    for line in _lines(columns, filter(_RATE.match, columns)):
        if line.label in plan:
            lines.append(Line(f"{line.label}, planned", "plan", plan[line.label]))
        lines.append(line)
    if any(line.colour == "plan" for line in lines):
        return replace(_RATES, lines=tuple(lines))
    note = f"No plan: {why_no_plan or 'none was written down'}."
    caption = "What the optimizer used."
    return replace(_RATES, lines=tuple(lines), caption=caption, note=note)


def _column_of(chart: Chart) -> str:
    return "lr-..." if chart.key == _RATES.key else f"{WINDOW}{chart.key}"


def _named(chart: Chart, optimizers: Mapping[str, str]) -> Chart:
    """The chart with the names of optimizers in place of their numbers."""

    def named(line: Line) -> Line:
        for start, name in optimizers.items():
            if line.label.startswith(WINDOW) and line.label.startswith(start):
                short = WINDOW + line.label.removeprefix(start)
                return replace(line, label=f"{short} of {name}")
            if line.label.partition(",")[0] == start:
                return replace(line, label=f"{line.label}, of {name}")
        return line

    return replace(chart, lines=tuple(map(named, chart.lines)))


def _rest(
    columns: Mapping[str, Series], used: set[str]
) -> tuple[list[Chart], list[str]]:
    """Charts of all other columns; those of training and validation share one."""
    groups: dict[str, list[str]] = {}
    for name in columns:
        is_known = name in used or re.sub(r"/\d+/", "/", name) in _NOT_CHARTS
        if not is_known:
            phase = next((p for p in _PHASES if name.startswith(p)), "")
            groups.setdefault(name.removeprefix(phase), []).append(name)
    charts = [_chart_of(names, columns) for names in groups.values()]
    rest = [line.label for chart in charts[_MOST_OTHERS:] for line in chart.lines]
    too_many = [f"{len(rest)} more columns: {', '.join(rest)}"] if rest else []
    return charts[:_MOST_OTHERS], too_many


def _chart_of(names: list[str], columns: Mapping[str, Series]) -> Chart:
    """The chart of columns that no chart is made for."""
    lines = [
        Line(line.label, "validation", line.series)
        if line.label.startswith("val")
        else line
        for line in _lines(columns, names)
    ]
    key = re.sub(r"[^A-Za-z0-9._-]+", "_", names[0])[:_LONGEST_KEY]
    return Chart(
        key=f"{METRIC}{key}",
        title=" and ".join(names),
        caption="As it was logged.",
        lines=tuple(lines),
        may_be_log=True,
        as_stairs=names[0].startswith(_SCALING),
    )
