"""Folders with a `metrics.csv`, and what is in a page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from html import unescape
from pathlib import Path
from typing import Any

from trainkit.cli.report.charts import Chart
from trainkit.cli.report.page import read_run, write_report
from trainkit.cli.runs import summary
from trainkit.cli.runs.folder import RunFolder

WINDOW = {
    "window/loss": 2.5,
    "window/weight": 4000.0,
    "window/micro_batches": 4.0,
    "window/imbalance": 1.2,
    "window/padding": 0.25,
    "window/grad_norm": 0.5,
    "lr-SGD": 0.1,
}
SUMMARY: dict[str, Any] = {
    "name": "small",
    "status": "finished",
    "steps": 4,
    "metrics": {"val/loss": 2.5, "lr-SGD": 0.1},
    "windows": {},
    "micro_batching": None,
    "learning_rates": [0.1],
    "plain_accumulation": {"mean": 0.058, "largest": 0.2},
    "effective_batch": {
        "micro_batch": 4,
        "accumulate": 4,
        "replicas": 2,
        "size": 32,
        "unit": "samples",
    },
    "versions": {"torch": "2.13.0"},
    "git_commit": None,
    "seconds": 10.6,
}


def run_folder(path: Path, rows: Iterable[Mapping[str, Any]]) -> RunFolder:
    """A folder in which these rows were logged."""
    path.mkdir(parents=True, exist_ok=True)
    rows = list(rows)
    names = list(dict.fromkeys(["step", *(name for row in rows for name in row)]))
    quoted = [f'"{name}"' for name in names]
    lines = [",".join(quoted)]
    lines += [",".join(str(row.get(name, "")) for name in names) for row in rows]
    (path / "metrics.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return RunFolder(path)


def ended(path: Path, **facts: Any) -> dict[str, Any]:
    """Write the summary of a run of four steps, but for these facts."""
    whole = {**SUMMARY, **facts}
    summary.write(whole, RunFolder(path))
    return whole


def page_of(folder: RunFolder, *, pictures: bool = False) -> str:
    write_report(read_run(folder), pictures=pictures)
    return (folder.path / "report.html").read_text(encoding="utf-8")


def charts_of(folder: RunFolder) -> dict[str, Chart]:
    """What is drawn in the page, by its title."""
    return {chart.title: chart for chart in read_run(folder).charts}


def titles(page: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", page)


def cells(page: str, kind: str) -> dict[str, list[str]]:
    """The rows of a table by their heads."""
    start = page.partition(f'<table class="{kind}">')[2].partition("</table>")[0]
    rows = [re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row) for row in start.split("<tr>")]
    return {row[0]: [*map(unescape, row[1:])] for row in rows if row}


def legends(page: str) -> dict[str, dict[str, str]]:
    """The last value of each line, by its name and by the title of its chart."""
    found = {}
    for figure in re.findall("<figure>(.*?)</figure>", page, re.DOTALL):
        lines = re.findall(r"</i>(.*?)<b>(.*?)</b>", figure)
        texts = {unescape(name): unescape(last) for name, last in lines}
        found[unescape(titles(figure)[0])] = texts
    return found


def drawn(page: str, title: str) -> list[list[list[float]]]:
    """The points of each line of a chart as its last SVG draws them, of each piece
    between gaps."""
    place = page.index(f"<h2>{title}</h2>")
    figure = page[place : page.index("</figure>", place)]
    svg = figure[figure.rindex("<svg") :]
    paths = re.findall(
        r'<path d="([^"]*)" clip-path[^>]*none; stroke: var\(--(?!faint)', svg
    )
    found = []
    for path in paths:
        pieces = [piece for piece in re.split("M", path) if piece.strip()]
        found.append([[float(n) for n in re.findall(r"-?[\d.]+", p)] for p in pieces])
    return found
