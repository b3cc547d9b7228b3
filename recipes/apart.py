"""How far apart the runs of one training ended, as a table in Markdown.

    trainkit train experiment=completions data.batch_size=32 paths.run_dir=runs/big
    trainkit train experiment=completions data.batch_size=1 paths.run_dir=runs/ours
    python recipes/apart.py runs/big runs/ours

`--metrics val/loss val/accuracy` chooses the columns.

The first run is the reference. "Off by" is the distance between a run's weights and the
reference's weights at the end, as a share of the distance that the reference was
trained.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import seed_everything
from omegaconf import OmegaConf
from torch import Tensor

from trainkit.config import instantiate


def weights_at_end(run: Path) -> Tensor:
    checkpoint = torch.load(
        run / "checkpoints" / "last.ckpt", map_location="cpu", weights_only=False
    )
    return _as_vector(checkpoint["state_dict"])


def weights_at_start(run: Path) -> Tensor:
    """The initial weights, made again from the run's configuration and seed."""
    config: Any = OmegaConf.load(run / "config.yaml")
    seed_everything(config.seed, verbose=False)
    return _as_vector(instantiate(config.model).state_dict())


def _as_vector(state: dict[str, Tensor]) -> Tensor:
    floats = [state[name] for name in sorted(state) if state[name].is_floating_point()]
    return torch.cat([each.double().flatten() for each in floats])


def off_by(weights: Tensor, reference: Tensor, start: Tensor) -> float:
    """The distance of weights from the reference, as a share of the reference's way.

    >>> off_by(torch.tensor([1.5]), torch.tensor([1.0]), torch.tensor([0.0]))
    0.5
    """
    return float((weights - reference).norm() / (reference - start).norm())


def shown(share: float) -> str:
    """A share as text, readable over ten orders of magnitude.

    >>> shown(0.173), shown(2e-07)
    ('17%', '2e-07')
    """
    return f"{share:.0%}" if 0.01 < share < 10 else f"{share:.0e}"


def main() -> None:
    parser = argparse.ArgumentParser(description="How far apart runs ended.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--metrics", nargs="+", metavar="NAME")
    options = parser.parse_args()
    runs: list[Path] = options.runs
    start, reference = weights_at_start(runs[0]), weights_at_end(runs[0])
    config: Any = OmegaConf.load(runs[0] / "config.yaml")
    names = options.metrics or [config.metric]
    columns = ["steps", *names, "weights off by"]
    print(f"| run | {' | '.join(columns)} |\n|---|{'---:|' * len(columns)}")
    for run in runs:
        summary = json.loads((run / "summary.json").read_text())
        values = [f"{summary['metrics'][name]:.4g}" for name in names]
        apart = shown(off_by(weights_at_end(run), reference, start))
        cells = [run.name, str(summary["steps"]), *values, apart * (run != runs[0])]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
