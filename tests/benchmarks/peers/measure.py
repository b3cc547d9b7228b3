"""One framework, measured in its own environment: what run.py starts.

    python -m tests.benchmarks.peers.measure trainkit out.json [--speed]
    torchrun --nproc-per-node 2 -m tests.benchmarks.peers.measure trainkit out.json

Writes the deviations from the big batch for all variants of the framework, or the
tokens per second; and the versions.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import traceback
import warnings
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tests.benchmarks.peers.work import DTYPES, OPTIMIZERS, Work


def deviations(train: Any, *, alone: bool) -> dict[str, Any]:
    """By optimizer, dtype and work; the control is the epoch in one pass per window."""
    results = {}
    for optimizer in OPTIMIZERS:
        for dtype in DTYPES:
            works = {
                name: Work.of(name, optimizer=optimizer, dtype=dtype)
                for name in ("step", "epoch")
            }
            if alone:
                works["control"] = works["epoch"].as_one_batch()
            for name, work in works.items():
                found = measured(train, work, work.deviation)
                results[f"{optimizer} {dtype} {name}"] = found
    return results


def speed(train: Any) -> float | str:
    work = Work.of("speed")
    return measured(train, work, work.tokens_per_second)


def measured(train: Any, work: Work, figure: Any) -> float | str:
    """A figure of the net that was trained, or the error."""
    net = work.net()
    try:
        train(work, net)
        return figure(net)
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}".splitlines()[0]


def versions(peer: ModuleType) -> dict[str, str]:
    found = {name: version(name) for name in (*peer.PACKAGES, "torch")}
    return {"python": platform.python_version(), **found}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure one framework.")
    parser.add_argument("peer")
    parser.add_argument("out", type=Path)
    parser.add_argument("--speed", action="store_true", help="tokens per second")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    peer = importlib.import_module(f"tests.benchmarks.peers.peer_{options.peer}")
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    torch.set_num_threads(1)  # more would be waiting where something else runs too
    results = {
        name: speed(train) if options.speed else deviations(train, alone=alone)
        for name, train in peer.VARIANTS.items()
    }
    if os.environ.get("RANK", "0") == "0":
        found = {"versions": versions(peer), "results": results}
        options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
