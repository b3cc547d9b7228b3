"""The league table: every framework in its own environment, and one table of all.

    python -m tests.benchmarks.peers.make_environments /tmp/peers
    python -m tests.benchmarks.peers.run /tmp/peers [--rounds 3] [--peers keras ...]

Each measurement is a process of its own, one after another. The figures go to
results.json in the folder, what the frameworks print to logs/, the table to the
console. With `--kinds` and nothing behind it, the table is of what is there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.peers.make_environments import RECIPES, ROOT, python_of

KINDS = ("deviation", "speed")
ALONE = {
    "keras": "Keras: no two ranks, since `fit` on torch is for one process.",
    "super_gradients": "Super-Gradients: no two ranks, since its DDP wants GPUs.",
}
"""Why a framework is not measured on two ranks."""


def measure(folder: Path, peer: str, kind: str, *, ranks: int = 1) -> dict[str, Any]:
    """Run measure.py in the framework's environment: what it wrote, or its log."""
    log = folder / "logs" / f"{peer}.{kind}.{ranks}.log"
    log.parent.mkdir(exist_ok=True)
    out = log.with_suffix(".json")
    out.unlink(missing_ok=True)
    launch = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [
        *(str(python_of(folder, peer)), "-m"),
        *([*launch, "-m"] if ranks > 1 else []),
        *("tests.benchmarks.peers.measure", peer, str(out)),
        *(["--speed"] if kind == "speed" else []),
    ]
    with log.open("w") as stream:
        run(command, folder, stream)
    return json.loads(out.read_text()) if out.exists() else {"failed": str(log)}


def run(command: list[str], folder: Path, stream: Any) -> None:
    """Run a command to its end, or for a quarter of an hour."""
    try:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    except OSError as error:  # no such environment
        stream.write(f"{error}\n")
        return
    try:
        process.wait(900)
    except subprocess.TimeoutExpired:
        process.terminate()  # not killed: torchrun then ends its ranks
        process.wait(60)


def environment(folder: Path) -> dict[str, str]:
    """A home of their own, no GPU, no hub, no account."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "HF_"))}
    return {
        **kept,
        "HOME": str(home),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
    }


def measure_all(
    folder: Path, peers: list[str], kinds: list[str], rounds: int
) -> dict[str, Any]:
    """Measure anew what is asked for; the rest stays as results.json has it."""
    results = folder / "results.json"
    found = json.loads(results.read_text()) if results.exists() else {}
    for peer in peers:
        kept = found.setdefault(peer, {"ranks": {}, "rounds": []})
        if "speed" in kinds:
            kept["rounds"] = []
        if "deviation" in kinds:
            print(f"{peer}: deviations", flush=True)
            for ranks in (1,) if peer in ALONE else (1, 2):
                measured = measure(folder, peer, "deviation", ranks=ranks)
                kept["ranks"][str(ranks)] = measured
    for number in range(rounds if "speed" in kinds else 0):
        for peer in peers:
            print(f"{peer}: speed, round {number + 1}", flush=True)
            found[peer]["rounds"].append(measure(folder, peer, "speed"))
    results.write_text(json.dumps(found, indent=1))
    return found


# ---- the table in Markdown ---------------------------------------------------------

REFERENCE = "Lightning"
COLUMNS = (  # heading, ranks, and the key of measure.deviations
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
        for name in measured["ranks"]["1"].get("results", {}):
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


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the frameworks.")
    parser.add_argument("folder", type=Path, help="that of make_environments")
    parser.add_argument("--peers", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS)
    parser.add_argument("--rounds", type=int, default=3, help="of the speed")
    options = parser.parse_args()
    folder = options.folder.resolve()
    found = measure_all(folder, options.peers, options.kinds, options.rounds)
    print(markdown({name: found[name] for name in RECIPES if name in found}, ALONE))


if __name__ == "__main__":
    main()
