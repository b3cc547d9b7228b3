"""Several runs in one page: a line for each, and a table of what differs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import yaml

from trainkit.cli.report.chart import Chart, Charts, Line, look_of_run
from trainkit.cli.report.page import mark, page
from trainkit.cli.report.series import WINDOW
from trainkit.cli.report.write import read_charts, read_facts, summary_rows, times_of
from trainkit.cli.runs.folder import RunFolder
from trainkit.errors import TrainkitError

_LONGEST = 40
"""The longest text of values in a legend, and in one line of the table."""
_NONE = "–"
_MANY = 15
"""More values that differ are folded away."""
_FEW = 4
"""Up to so many runs are the columns of the table; more are its rows."""
_MOST_BANDS = 3
"""Of more runs there are only lines: their bands would lie on each other."""


@dataclass(frozen=True)
class Run:
    """A run among others.

    Attributes:
        name: tells it apart from the others.
        config: its configuration, as texts by dotted keys.
        ended: the rows of its summary.
    """

    name: str
    charts: Charts
    config: Mapping[str, str]
    ended: Mapping[str, str]


def runs_in(path: Path) -> tuple[list[RunFolder], list[Path]]:
    """The runs in the folder of a multirun, and those without rows.

    Both are empty if it is the folder of something else.
    """
    for deep in ("*", "*/*"):
        found = [each.parent for each in path.glob(f"{deep}/{RunFolder.OVERRIDES}")]
        found += [each.parent for each in path.glob(f"{deep}/{RunFolder.METRICS}")]
        if found:
            break
    ordered = sorted(set(found), key=_by_number)
    has_rows = {each: (each / RunFolder.METRICS).is_file() for each in ordered}
    runs = [RunFolder(each) for each in ordered if has_rows[each]]
    return runs, [each for each in ordered if not has_rows[each]]


def _by_number(path: Path) -> tuple[str, int, str]:
    number = int(path.name) if path.name.isdecimal() else -1
    return str(path.parent), number, path.name


def read_run(folder: RunFolder, name: str) -> Run:
    """Read a run.

    Raises:
        TrainkitError: a file of it is damaged, or it has no rows.
    """
    times = times_of(folder)
    charts = read_charts(folder, times)
    if not charts.shown:
        raise TrainkitError(
            f"RUN_DIR: must have rows of numbers in {folder.METRICS}, and "
            f"{folder.path} has none yet. Leave it out, or wait until it logs one."
        )
    facts = read_facts(folder)
    ended = dict(summary_rows(facts, charts, times))
    if not facts:
        ended["training"] = f"under way or killed, step {charts.last_step:,.0f}"
        ended |= {
            line.label: chart.text(line.series.shown[-1][1])
            for chart in charts.shown
            for line in chart.lines
            if line.colour == "validation"
        }
    return Run(name, charts, _config(folder), ended)


def comparison(runs: Sequence[Run], *, where: str, left_out: Sequence[str]) -> str:
    """The text of the page of several runs."""
    differing = _differing([run.config for run in runs])
    return page(
        Charts(list(_together(runs, differing)), left_out),
        title=f"{len(runs)} runs",
        where=where,
        table=_tables(runs, differing),
    )


def short_names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of paths that tell them apart.

    >>> short_names([Path("/a/x/0"), Path("/a/y/0"), Path("/a/y/1")])
    ['x/0', 'y/0', 'y/1']
    """
    for count in range(1, max(len(path.parts) for path in paths)):
        names = [os.path.join(*path.parts[-count:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _together(runs: Sequence[Run], differing: Sequence[str]) -> Iterator[Chart]:
    """A chart for each column, with a line for each run."""
    found: dict[tuple[str, str], tuple[Chart, list[Line]]] = {}
    for place, run in enumerate(runs):
        colour, dash = look_of_run(place)
        label = _label(run, differing)
        for chart in run.charts.shown:
            for line in chart.lines:
                if line.colour != "plan":
                    _, lines = found.setdefault((chart.key, line.label), (chart, []))
                    lines.append(replace(line, label=label, colour=colour, dash=dash))
    keys = [key for key, _ in found]
    for (key, label), (chart, lines) in found.items():
        is_only = keys.count(key) == 1 or chart.title == label
        is_logged = key == "loss" and not lines[0].series.name.startswith(WINDOW)
        caption = chart.caption.partition(", and ")[0].rstrip(".") + "."
        yield replace(
            chart,
            title=chart.title if is_only else f"{chart.title}: {label}",
            caption="As it was logged." if is_logged else caption,
            lines=tuple(lines),
            has_bands=len(runs) <= _MOST_BANDS,
            note="",
        )


def _label(run: Run, differing: Sequence[str]) -> str:
    """The run's name, with what differs if that is short."""
    parts = [
        f"{key.rpartition('.')[2]}={run.config.get(key, _NONE)}" for key in differing
    ]
    said = ", ".join(parts)
    return f"{run.name}: {said}" if 0 < len(said) <= _LONGEST else run.name


def _tables(runs: Sequence[Run], differing: Sequence[str]) -> str:
    """What differs in the configurations, and how the runs ended."""
    configs = {key: [run.config.get(key, _NONE) for run in runs] for key in differing}
    told = dict.fromkeys(["training", *_differing([run.ended for run in runs])])
    ends = {name: [run.ended.get(name, _NONE) for run in runs] for name in told}
    if not differing:
        return f"<p>Their configurations are equal.</p>{_table(runs, ends)}"
    if len(differing) <= _MANY:
        return _table(runs, configs | ends)
    return (
        f"{_table(runs, ends)}<details><summary>{len(differing)} values of their "
        f"configurations differ</summary>{_table(runs, configs)}</details>"
    )


def _table(runs: Sequence[Run], texts: Mapping[str, Sequence[str]]) -> str:
    heads = [mark(*look_of_run(n)) + escape(run.name) for n, run in enumerate(runs)]
    rows = [["", *heads]]
    rows += [[escape(name), *map(escape, cells)] for name, cells in texts.items()]
    if len(runs) > _FEW:
        rows = [list(column) for column in zip(*rows, strict=True)]
    body = "".join(
        f'<tr><th scope="row">{first}</th>' + "".join(map(_cell, rest)) + "</tr>"
        for first, *rest in rows
    )
    return f'<div class="scroll"><table class="runs">{body}</table></div>'


def _cell(text: str) -> str:
    is_short = len(text) <= _LONGEST or text.startswith("<i")
    return f"<td class=short>{text}</td>" if is_short else f"<td>{text}</td>"


def _differing(found: Sequence[Mapping[str, str]]) -> list[str]:
    """The keys under which not all have the same text."""
    keys = dict.fromkeys(key for each in found for key in each)
    return [key for key in keys if len({each.get(key) for each in found}) > 1]


def _config(folder: RunFolder) -> dict[str, str]:
    """The configuration by dotted keys, with RUN_DIR for the run's own folder."""
    path = folder.path / folder.CONFIG
    if not path.is_file():
        return {}
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise TypeError(f"it holds {type(config).__name__}")
    except (yaml.YAMLError, UnicodeDecodeError, TypeError) as error:
        said = " ".join(str(error).split())
        raise TrainkitError(
            f"{path}: must be YAML with a mapping, as a run writes it, and is damaged: "
            f"{said}. Mend it or remove it."
        ) from error
    own = str((config.pop("paths", None) or {}).get("run_dir") or folder.path)
    return {key: text.replace(own, "RUN_DIR") for key, text in _flat(config, "") if key}


def _flat(node: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, dict):
        for name, value in node.items():
            yield from _flat(value, f"{key}.{name}" if key else str(name))
    else:
        is_text = isinstance(node, str)
        yield key, node if is_text else json.dumps(node, default=str)
