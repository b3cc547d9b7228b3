"""The league table in Markdown, from what run.py found.

python -m tests.benchmarks.peers.table /tmp/peers/results.json
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

REFERENCE = "Lightning"
# Heading, ranks, and the key of measure.deviations.
COLUMNS = (
    ("one step", "1", "sgd float32 step"),
    ("epoch", "1", "sgd float32 epoch"),
    ("two ranks: step", "2", "sgd float32 step"),
    ("two ranks: epoch", "2", "sgd float32 epoch"),
    ("AdamW: epoch", "1", "adamw float64 epoch"),
    ("control", "1", "sgd float32 control"),
)


def markdown(found: Mapping[str, Any], alone: Mapping[str, str]) -> str:
    """Versions, machine, and a row for each variant of each framework."""
    headings = ["", *(heading for heading, *_ in COLUMNS), "tokens/s", "/ Lightning"]
    lines = [
        *facts(found),
        "",
        "| " + " | ".join(headings) + " |",
        "|---" + "|---:" * (len(headings) - 1) + "|",
    ]
    for peer, measured in found.items():
        for name in variants(measured):
            cells = [cell(measured, name, *column) for _, *column in COLUMNS]
            speeds = rates(measured, name)
            ratios = against(speeds, found.get("lightning"))
            cells += [f"{median(speeds):,.0f}" if speeds else "–"]
            cells += [f"{median(ratios):.2f}" if ratios else "–"]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        if "failed" in measured["ranks"]["1"]:
            lines.append(f"| {peer} | failed: see {measured['ranks']['1']['failed']} |")
    notes = [f"- {alone[peer]}" for peer in found if peer in alone]
    return "\n".join([*lines, "", *notes])


def facts(found: Mapping[str, Any]) -> list[str]:
    """When, where, and with which versions."""
    versions: dict[str, str] = {}
    for measured in found.values():
        versions.update(measured["ranks"]["1"].get("versions", {}))
    today = datetime.now(tz=timezone.utc).date()
    machine = f"{os.cpu_count()} CPU cores, {platform.machine()}"
    listed = ", ".join(f"{name} {number}" for name, number in sorted(versions.items()))
    return [f"{today}, {machine}; {listed}."]


def variants(measured: Mapping[str, Any]) -> list[str]:
    return list(measured["ranks"]["1"].get("results", {}))


def cell(measured: Mapping[str, Any], name: str, ranks: str, key: str) -> str:
    on_ranks = measured["ranks"].get(ranks, {})
    if "failed" in on_ranks:
        return "failed"
    return written(on_ranks.get("results", {}).get(name, {}).get(key))


def written(off: float | str | None) -> str:
    """A deviation as people read it.

    >>> written(0.1989), written(3.1151), written(2e-6), written(None)
    ('20%', '312%', '2e-06', '–')
    """
    if off is None:
        return "–"
    if isinstance(off, str):
        return "error"
    return f"{off:.0%}" if off >= 0.005 else f"{off:.0e}"


def rates(measured: Mapping[str, Any], name: str) -> list[float]:
    """Tokens per second in each round."""
    found = [each.get("results", {}).get(name) for each in measured["rounds"]]
    return [rate for rate in found if isinstance(rate, float)]


def against(speeds: list[float], reference: Any) -> list[float]:
    """Ratios to plain Lightning, each within a round."""
    others = rates(reference, REFERENCE) if reference else []
    if len(speeds) != len(others):
        return []
    return [a / b for a, b in zip(speeds, others, strict=True)]


if __name__ == "__main__":
    print(markdown(json.loads(Path(sys.argv[1]).read_text()), {}))
