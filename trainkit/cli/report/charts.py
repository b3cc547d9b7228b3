"""The choice of charts for the columns of a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from trainkit.cli.report.chart import Chart, Charts, Line, Role
from trainkit.cli.report.noise_chart import HIGH, LOW, noise_chart
from trainkit.cli.report.noise_chart import KEYS as NOISE_KEYS
from trainkit.cli.report.series import WINDOW, Series

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
_WINDOWS = (
    _WEIGHT,
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
)
_THROUGHPUT = Chart(
    "throughput",
    "Throughput",
    "What was trained on in a second, validation left out.",
    from_zero=True,
)
_CUT = Chart(
    "micro_batch_size",
    "Micro-batch size",
    "The limit of each micro-batch, which is found while the training runs.",
    from_zero=True,
    as_stairs=True,
)

_RATES_OF_DATA = {"tokens per second": "tokens_per_second"}
_RATES_OF_DATA |= {"samples per second": "samples_per_second"}
"""The keys of the charts of throughput by the names of their columns."""
KEYS = frozenset(
    (
        *(chart.key for chart in (_LOSS, *_WINDOWS, _CUT)),
        *_RATES_OF_DATA.values(),
        *NOISE_KEYS,
    )
)


def choose(
    columns: Mapping[str, Series],
    plan: Mapping[str, Series],
    *,
    why_no_plan: str = "",
    unit: str = "",
    optimizers: Mapping[str, str] | None = None,
) -> Charts:
    """Sort a run's columns into charts.

    Args:
        columns: the columns by their names.
        plan: the planned learning rates by the names of their columns.
        why_no_plan: the reason if there is no plan.
        unit: what weights count, if it has a name.
        optimizers: the names of several optimizers by the beginnings of their columns.
    """
    loss = replace(_LOSS, lines=_losses(columns), note=_skipped(columns))
    charts = [loss]
    for chart in (*_WINDOWS, _CUT):
        if chart is _RATES:
            charts.append(_rates(columns, plan, why_no_plan))
        else:
            charts.append(replace(chart, lines=_window_lines(columns, chart.key)))
        if chart is _WEIGHT:
            charts[-1] = _in_unit(charts[-1], unit)
            charts += _throughputs(columns)
    used = {line.series.name for chart in charts for line in chart.lines}
    noise = noise_chart(columns)
    if noise is not None:
        charts.append(noise)
        used |= {noise.lines[0].series.name, LOW, HIGH}
    others, too_many = _others(columns, used)
    missing = [
        f"{chart.title.lower()} ({_column_of(chart)} was not logged)"
        for chart in charts
        if not chart.lines and chart.key != _CUT.key
    ]
    shown = [_named(chart, optimizers or {}) for chart in charts if chart.lines]
    return Charts((*shown, *others), (*missing, *too_many))


def _in_unit(weight: Chart, unit: str) -> Chart:
    if not unit:
        return weight
    caption = f"How many {unit} each optimizer step counted."
    return replace(weight, title=f"Window weight, in {unit}", caption=caption)


def _throughputs(columns: Mapping[str, Series]) -> list[Chart]:
    return [
        replace(
            _THROUGHPUT,
            key=key,
            title=f"Throughput, in {name}",
            lines=(Line(name, "train", columns[name]),),
        )
        for name, key in _RATES_OF_DATA.items()
        if name in columns
    ]


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


def _skipped(columns: Mapping[str, Series]) -> str:
    """A remark if there were windows between those that were logged."""
    seen, weight = columns.get(f"{WINDOW}seen"), columns.get(f"{WINDOW}weight")
    if seen is None or weight is None or seen.steps != weight.steps:
        return ""
    skipped = sum(
        now - own > before + 0.5 * own
        for before, now, own in zip(
            seen.values, seen.values[1:], weight.values[1:], strict=False
        )
    )
    if not skipped:
        return ""
    return (
        "Between these points are windows that were not logged. "
        "callbacks.monitor.every_n_steps=1 logs all of them."
    )


def _column_of(chart: Chart) -> str:
    return "lr-..." if chart.key == _RATES.key else f"{WINDOW}{chart.key}"


def _losses(columns: Mapping[str, Series]) -> tuple[Line, ...]:
    lines = list(_window_lines(columns, "loss", role="train"))
    if not lines:
        names = ("train/loss", "train_loss", "train/loss_step", "train_loss_step")
        lines += [Line(n, "train", columns[n]) for n in names if n in columns][:1]
    lines += [
        Line(name, "validation", series)
        for name, series in columns.items()
        if _VALIDATION.match(name)
    ]
    return tuple(lines)


def _window_lines(
    columns: Mapping[str, Series], key: str, *, role: Role = "train"
) -> tuple[Line, ...]:
    """One line for each optimizer."""
    of_key = re.compile(rf"^{WINDOW}(?:\d+/)?{key}$")
    names = sorted(name for name in columns if of_key.match(name))
    return tuple(
        Line(name, role if place == 0 else "other", columns[name])
        for place, name in enumerate(names)
    )


def _rates(
    columns: Mapping[str, Series], plan: Mapping[str, Series], why_no_plan: str
) -> Chart:
    lines: list[Line] = []
    for place, name in enumerate(name for name in columns if _RATE.match(name)):
        if name in plan:
            lines.append(Line(f"{name}, planned", "plan", plan[name]))
        lines.append(Line(name, "other" if place else "train", columns[name]))
    if any(line.role == "plan" for line in lines):
        return replace(_RATES, lines=tuple(lines))
    why = why_no_plan or "none was written down"
    caption = "What the optimizer used."
    return replace(_RATES, lines=tuple(lines), caption=caption, note=f"No plan: {why}.")


def _others(
    columns: Mapping[str, Series], used: set[str]
) -> tuple[list[Chart], list[str]]:
    """Charts of all other columns; those of training and validation share one."""
    groups: dict[str, list[str]] = {}
    for name in columns:
        is_known = name in used or re.sub(r"/\d+/", "/", name) in _NOT_CHARTS
        if not is_known:
            phase = next((p for p in _PHASES if name.startswith(p)), "")
            groups.setdefault(name.removeprefix(phase), []).append(name)
    charts = [_other(names, columns) for names in groups.values()]
    rest = [line.label for chart in charts[_MOST_OTHERS:] for line in chart.lines]
    too_many = [f"{len(rest)} more columns: {', '.join(rest)}"] if rest else []
    return charts[:_MOST_OTHERS], too_many


def _other(names: list[str], columns: Mapping[str, Series]) -> Chart:
    role: Role = "validation" if names[0].startswith("val") else "train"
    lines = [Line(names[0], role, columns[names[0]])]
    for name in names[1:]:
        is_second = role == "train" and name.startswith("val")
        lines.append(Line(name, "validation" if is_second else "other", columns[name]))
    key = re.sub(r"[^A-Za-z0-9._-]+", "_", names[0])[:_LONGEST_KEY]
    return Chart(
        key=f"{METRIC}{key}",
        title=" and ".join(names),
        caption="As it was logged.",
        lines=tuple(lines),
        may_be_log=True,
        as_stairs=names[0].startswith(_SCALING),
    )
