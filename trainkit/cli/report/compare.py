"""Several runs in one page: a line for each, and a table of what differs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import yaml

from trainkit.cli.report.chart import Chart, Charts
from trainkit.cli.report.charts import METRIC
from trainkit.cli.report.line import Line
from trainkit.cli.report.page import mark, page
from trainkit.cli.report.write import Run
from trainkit.cli.runs.folder import RunFolder
from trainkit.errors import TrainkitError

_COLOURS = ("train", "validation", "other1", "other2", "other3", "other4")
_DASHES = ("solid", "dashed", "dotted")
_LONGEST = 40
"""The longest text of values in a legend."""
_NONE = "–"
_MANY = 15
"""More values that differ are folded away."""
_FEW = 4
"""Up to so many runs are the columns of the table; more are its rows."""
_MOST_BANDS = 3
"""Of more runs there are only lines: their bands would lie on each other."""


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


def comparison(runs: Sequence[Run], *, left_out: Sequence[str]) -> str:
    """The text of the page of several runs."""
    where = os.path.commonpath([run.folder.path for run in runs])
    names = [os.path.relpath(run.folder.path, where) for run in runs]
    configs = [_config(run.folder) for run in runs]
    differing = _differing(configs)
    labels = [_label(*of, differing) for of in zip(names, configs, strict=True)]
    ends = [dict(run.rows) for run in runs]
    told = dict.fromkeys(["training", *_differing(ends)])
    whole = [{**config, **end} for config, end in zip(configs, ends, strict=True)]
    if len(differing) > _MANY:
        said = f"{len(differing)} values of their configurations differ"
        hidden = _table(names, configs, differing)
        table = _table(names, whole, told)
        table += f"<details><summary>{said}</summary>{hidden}</details>"
    else:
        table = "" if differing else "<p>Their configurations are equal.</p>"
        table += _table(names, whole, [*differing, *told])
    return page(
        Charts(list(_together(runs, labels)), left_out),
        title=f"{len(runs)} runs",
        where=where,
        table=table,
    )


def _look(place: int) -> dict[str, str]:
    """The colour and the dashes of one of several runs."""
    turn, place = divmod(place, len(_COLOURS))
    return {"colour": _COLOURS[place], "dash": _DASHES[turn % len(_DASHES)]}


def _label(name: str, config: Mapping[str, str], differing: Sequence[str]) -> str:
    """A run's name, with what differs if that is short."""
    parts = [f"{key.rpartition('.')[2]}={config.get(key, _NONE)}" for key in differing]
    said = ", ".join(parts)
    return f"{name}: {said}" if 0 < len(said) <= _LONGEST else name


def _together(runs: Sequence[Run], labels: Sequence[str]) -> Iterator[Chart]:
    """A chart for each column, with a line for each run."""
    found: dict[tuple[str, str], tuple[Chart, list[Line]]] = {}
    for place, run in enumerate(runs):
        look = {"name": labels[place], **_look(place)}
        for chart in run.charts.shown:
            # A title has the unit; those of other metrics name what is beside them.
            same = chart.key if chart.key.startswith(METRIC) else chart.title
            for line in chart.lines:
                if line.colour != "plan":
                    _, lines = found.setdefault((same, line.name), (chart, []))
                    lines.append(replace(line, **look))
    every = [same for same, _ in found]
    for (same, name), (chart, lines) in found.items():
        is_only = every.count(same) == 1 or chart.title == name
        yield replace(
            chart,
            title=chart.title if is_only else f"{chart.title}: {name}",
            caption=chart.caption.partition(", and ")[0].rstrip(".") + ".",
            lines=lines,
            has_bands=len(runs) <= _MOST_BANDS,
            note="",
        )


def _table(
    names: Sequence[str], texts: Sequence[Mapping[str, str]], keys: Iterable[str]
) -> str:
    """A table of texts by their keys, with a column for each run, or a row."""
    heads = [mark(**_look(place)) + escape(name) for place, name in enumerate(names)]
    rows = [["", *heads]]
    rows += [[escape(k), *(escape(of.get(k, _NONE)) for of in texts)] for k in keys]
    if len(names) > _FEW:
        rows = [list(column) for column in zip(*rows, strict=True)]
    body = "".join(
        f'<tr><th scope="row">{head}</th><td>{"</td><td>".join(cells)}</td></tr>'
        for head, *cells in rows
    )
    return f'<div class="scroll"><table class="runs">{body}</table></div>'


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
        yield key, node if isinstance(node, str) else json.dumps(node, default=str)
