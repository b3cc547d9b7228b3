"""Folders with a `metrics.csv`, and what is in a page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from html import unescape
from pathlib import Path
from typing import Any

from trainkit.cli.report.chart import Charts
from trainkit.cli.report.write import read_run, write_report
from trainkit.cli.runs.folder import RunFolder

WINDOW = {
    "window/loss": 2.5,
    "window/weight": 4000.0,
    "window/micro_batches": 4.0,
    "window/imbalance": 1.2,
    "window/uniform_gap": 0.1,
    "window/padding": 0.25,
    "window/grad_norm": 0.5,
    "lr-SGD": 0.1,
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


def page_of(folder: RunFolder, *, pictures: bool = False) -> str:
    write_report(read_run(folder), pictures=pictures)
    return (folder.path / "report.html").read_text(encoding="utf-8")


def charts_of(folder: RunFolder) -> Charts:
    """What is drawn in the page."""
    return read_run(folder).charts


def titles(page: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", page)


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
