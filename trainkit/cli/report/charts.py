"""The choice of charts for the columns of a run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from trainkit.cli.report.chart import Chart, Charts
from trainkit.cli.report.line import WINDOW, Line
from trainkit.cli.report.noise_chart import HIGH, LOW, noise_chart
from trainkit.cli.report.noise_chart import KEYS as NOISE_KEYS
from trainkit.cli.report.throughput import RATES
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

_THROUGHPUT = Chart(
    "",
    "Throughput, in ",
    "What was trained on in a second, without validations and checkpoints.",
    from_zero=True,
)
_CHARTS = (
    Chart(
        "loss",
        "Loss",
        "The mean loss of all ranks, in each window and in each validation.",
        may_be_log=True,
    ),
    Chart(
        "weight",
        "Window weight",
        "How much each optimizer step counted, as the strategy weighs.",
        from_zero=True,
    ),
    *(
        replace(_THROUGHPUT, key=key, title=_THROUGHPUT.title + name)
        for name, key in RATES.items()
    ),
    Chart(
        "imbalance",
        "Imbalance",
        "The largest share of a micro-batch times their number; 1 is even.",
    ),
    Chart(
        "learning_rate",
        "Learning rate",
        "What the optimizer used, and what was planned when the training began.",
        from_zero=True,
    ),
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
KEYS = {*NOISE_KEYS, *(chart.key for chart in _CHARTS)}
"""The keys of all charts that have a name of ours."""


def choose(
    columns: Mapping[str, Line],
    plan: Mapping[str, Line],
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
    charts = []
    for chart in _CHARTS:
        if chart.key == "loss":
            chart = replace(chart, lines=_losses(columns))
        elif chart.key == "learning_rate":
            chart = _with_plan(chart, columns, plan, why_no_plan)
        elif chart.key in RATES.values():
            name = next(name for name, key in RATES.items() if key == chart.key)
            mean = (speed or {}).get(chart.key)
            note = f"Over all steps: {three_digits(mean)} {name}." if mean else ""
            chart = replace(chart, lines=_found(columns, [name]), note=note)
        else:
            chart = replace(chart, lines=_of_windows(columns, chart.key))
        if chart.key == "weight" and unit:
            caption = f"How many {unit} each optimizer step counted."
            title = f"{chart.title}, in {unit}"
            chart = replace(chart, title=title, caption=caption)
        charts.append(chart)
    used = {line.name for chart in charts for line in chart.lines}
    noise = noise_chart(columns)
    if noise is not None:
        charts.append(noise)
        used |= {noise.lines[0].name, LOW, HIGH}
    shown = [_named(chart, optimizers or {}) for chart in charts if chart.lines]
    others = _others(columns, used)
    rest = [line.name for chart in others[_MOST_OTHERS:] for line in chart.lines]
    too_many = [f"{len(rest)} more columns: {', '.join(rest)}"] if rest else []
    return Charts([*shown, *others[:_MOST_OTHERS]], too_many)


def _found(columns: Mapping[str, Line], names: Iterable[str]) -> list[Line]:
    """The columns of these names, all after the first one dashed."""
    lines = [columns[name] for name in names if name in columns]
    return [
        replace(line, colour=f"other{(n - 1) % 4 + 1}", dash="dashed") if n else line
        for n, line in enumerate(lines)
    ]


def _of_windows(columns: Mapping[str, Line], key: str) -> list[Line]:
    """One line for each optimizer."""
    of_key = re.compile(rf"^{WINDOW}(?:\d+/)?{key}$")
    return _found(columns, sorted(filter(of_key.match, columns)))


def _losses(columns: Mapping[str, Line]) -> list[Line]:
    lines = _of_windows(columns, "loss") or _found(columns, _LOSSES)[:1]
    validations = _found(columns, filter(_VALIDATION.match, columns))
    return [*lines, *map(_of_validation, validations)]


def _of_validation(line: Line) -> Line:
    return replace(line, colour="validation", dash="solid")


def _with_plan(
    chart: Chart, columns: Mapping[str, Line], plan: Mapping[str, Line], why: str
) -> Chart:
    lines: list[Line] = []
    for line in _found(columns, filter(_RATE.match, columns)):
        if line.name in plan:
            name = f"{line.name}, planned"
            lines.append(replace(plan[line.name], name=name, colour="plan"))
        lines.append(line)
    if any(line.colour == "plan" for line in lines):
        return replace(chart, lines=lines)
    note = f"No plan: {why or 'none was written down'}."
    return replace(chart, lines=lines, caption="What the optimizer used.", note=note)


def _named(chart: Chart, optimizers: Mapping[str, str]) -> Chart:
    """The chart with the names of optimizers behind those of their columns."""
    lines = []
    for line in chart.lines:
        for start, name in optimizers.items():
            is_rate = line.name.partition(",")[0] == start
            if is_rate or (start.endswith("/") and line.name.startswith(start)):
                line = replace(line, name=f"{line.name}, of {name}")
        lines.append(line)
    return replace(chart, lines=lines)


def _others(columns: Mapping[str, Line], used: set[str]) -> list[Chart]:
    """Charts of all other columns; those of training and validation share one."""
    groups: dict[str, list[str]] = {}
    for name in columns:
        is_known = name in used or re.sub(r"/\d+/", "/", name) in _NOT_CHARTS
        if not is_known:
            phase = next((p for p in _PHASES if name.startswith(p)), "")
            groups.setdefault(name.removeprefix(phase), []).append(name)
    return [
        Chart(
            key=METRIC + re.sub(r"[^A-Za-z0-9._-]+", "_", names[0])[:_LONGEST_KEY],
            title=" and ".join(names),
            caption="As it was logged.",
            lines=[
                _of_validation(line) if line.name.startswith("val") else line
                for line in _found(columns, names)
            ],
            may_be_log=True,
            as_stairs=names[0].startswith(_SCALING),
        )
        for names in groups.values()
    ]
