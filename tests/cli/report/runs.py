"""Folders with a `metrics.csv`, and what is in a page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trainkit.cli.report.write import write_report
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
    write_report(folder, pictures=pictures)
    return (folder.path / "report.html").read_text(encoding="utf-8")


def titles(page: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", page)


def charts(page: str) -> list[dict[str, Any]]:
    """What the page's script reads, for each chart."""
    found = re.search(r'<script id="points"[^>]*>(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return list(json.loads(found[1]).values())


def points(line: dict[str, Any]) -> list[tuple[float, float | None]]:
    """Steps and values of a line; a gap is None."""
    return list(zip(line["steps"], line["values"], strict=True))
