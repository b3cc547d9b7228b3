"""Several runs in one page: a line for each, and a table of what differs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from trainkit.cli.report.charts import METRIC, Chart
from trainkit.cli.report.lines import Line
from trainkit.cli.report.page import page
from trainkit.cli.report.run import Run, read
from trainkit.cli.runs.folder import RunFolder
from trainkit.cli.sweep.whole_config import flatten
from trainkit.pages.frame import table

_COLOURS = ("train", "validation", "other1", "other2", "other3", "other4")
_DASHES = ("solid", "dashed", "dotted")
_LONGEST = 40
"""The longest text of values in a legend."""
_NONE = "–"


def comparison(runs: Sequence[Run], *, left_out: Sequence[str]) -> str:
    """The text of the page of several runs."""
    where = os.path.commonpath([run.folder.path for run in runs])
    names = [os.path.relpath(run.folder.path, where) for run in runs]
    configs = [_config(run.folder) for run in runs]
    ends = [dict(run.rows) for run in runs]
    differing = _differing(configs)
    labels = [_label(*of, differing) for of in zip(names, configs, strict=True)]
    rows = [["", *names]]
    for texts, keys in (configs, differing), (ends, ["training", *_differing(ends)]):
        for key in dict.fromkeys(keys):
            rows.append([key, *(of.get(key, _NONE) for of in texts)])
    said = f"Values of their configurations that differ: {len(differing)}"
    top = f"<details open><summary>{said}</summary>{table(rows, 'runs')}</details>"
    charts = list(_together(runs, labels))
    title = f"{len(runs)} runs"
    return page(charts, title=title, where=where, top=top, left_out=left_out)


def _label(name: str, config: Mapping[str, str], differing: Sequence[str]) -> str:
    """A run's name, with what differs if that is short."""
    parts = [f"{key.rpartition('.')[2]}={config.get(key, _NONE)}" for key in differing]
    said = ", ".join(parts)
    return f"{name}: {said}" if 0 < len(said) <= _LONGEST else name


def _together(runs: Sequence[Run], labels: Sequence[str]) -> Iterator[Chart]:
    """A chart for each column, with a line for each run; a title has its unit."""
    found: dict[tuple[str, str], tuple[Chart, list[Line]]] = {}
    for place, run in enumerate(runs):
        turn, colour = divmod(place, len(_COLOURS))
        dash = _DASHES[turn % len(_DASHES)]
        look = {"name": labels[place], "colour": _COLOURS[colour], "dash": dash}
        for chart in run.charts:
            is_ours = not chart.key.startswith(METRIC)
            for line in chart.lines:
                key = (chart.title if is_ours else line.name, line.name)
                _, lines = found.setdefault(key, (chart, []))
                lines.append(replace(line, **look))
    titles = [title for title, _ in found]
    for (title, name), (chart, lines) in found.items():
        is_only = titles.count(title) == 1
        title = title if is_only else f"{title}: {name}"
        yield replace(chart, title=title, lines=lines, note="")


def _differing(found: Sequence[Mapping[str, str]]) -> list[str]:
    """The keys under which not all have the same text."""
    keys = dict.fromkeys(key for each in found for key in each)
    return [key for key in keys if len({each.get(key) for each in found}) > 1]


def _config(folder: RunFolder) -> dict[str, str]:
    """The configuration by dotted keys, with RUN_DIR for the run's own folder."""

    def texts(path: Path) -> dict[str, str]:
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        config = dict(yaml.safe_load(text) or {})
        own = str((config.pop("paths", None) or {}).get("run_dir") or folder.path)
        return {
            key: (
                each if isinstance(each, str) else json.dumps(each, default=str)
            ).replace(own, "RUN_DIR")
            for key, each in flatten(config).items()
        }

    return read(folder, folder.CONFIG, texts)
