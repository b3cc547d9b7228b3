"""The table and picture of README.md: steps with one strategy for both terms.

    python -m recipes.multi_term.compare outputs/multi_term/2026-11-21_20-23-28-cc2e

With the weights of a run, some batches are cut by length under budgets of tokens. Their
gradients are compared with the gradients of the uncut batches.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt
from torch import Tensor
from trainkit.recipes.multi_term import Names, NameVAE  # type: ignore[import-not-found]
from trainkit.recipes.multi_term.multi_term import IGNORED, Batch  # type: ignore[import-not-found]

from trainkit import Accumulator, PerSample, PerToken, Uniform

BUDGETS = (512, 256, 128, 64)
NUM_BATCHES = 8
BOTH = {"ce": PerToken(), "kl": PerSample()}
WAYS = {
    "Uniform() for both": Uniform(),
    "PerToken() for both": PerToken(),
    "PerSample() for both": PerSample(),
}


# ---- steps ---------------------------------------------------------------------------


def cut(batch: Batch, tokens: int) -> list[Batch]:
    """Cut a batch by length into micro-batches of at most so many padded tokens."""
    lengths = (batch["labels"] != IGNORED).sum(1)
    parts: list[list[int]] = [[]]
    for row in lengths.argsort().tolist():
        if (len(parts[-1]) + 1) * int(lengths[row]) > tokens and parts[-1]:
            parts.append([])
        parts[-1].append(row)
    return [_rows(batch, rows, int(lengths[rows].max())) for rows in parts]


def _rows(batch: Batch, rows: list[int], length: int) -> Batch:
    return {
        "ids": batch["ids"][rows, :length],
        "labels": batch["labels"][rows, :length],
        "noise": batch["noise"][rows],
    }


def gradient(module: NameVAE, batches: list[Batch], strategy: Any) -> Tensor:
    """The gradient of a window, with one strategy for both terms or one for each."""
    module.zero_grad()
    accumulator = Accumulator(strategy)
    accumulator.expect(batches)
    for batch in batches:
        ce, kl = module.terms(batch)
        terms = {"ce": ce, "kl": module.beta * kl}
        accumulator.backward(terms if strategy is BOTH else ce + terms["kl"], batch)
    accumulator.finish(list(module.parameters()))
    return torch.cat(
        [p.grad.flatten() for p in module.parameters() if p.grad is not None]
    )


def measure(module: NameVAE, batches: list[Batch]) -> dict[str, list[float]]:
    """The mean error for each way and budget, as a share of the gradient's norm."""
    exact = [gradient(module, [batch], BOTH) for batch in batches]

    def off(way: Any, tokens: int) -> float:
        found = (gradient(module, cut(batch, tokens), way) for batch in batches)
        return statistics.mean(
            float((each - true).norm() / true.norm())
            for each, true in zip(found, exact, strict=True)
        )

    ways = {**WAYS, "a strategy for each": BOTH}
    return {
        name: [off(way, tokens) for tokens in BUDGETS] for name, way in ways.items()
    }


# ---- table and picture ---------------------------------------------------------------


def draw(found: dict[str, list[float]], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
    colors = ("#8c8c8c", "#c44e52", "#dd8452", "#55a868")
    for (name, shares), color in zip(found.items(), colors, strict=True):
        axes.plot(range(len(BUDGETS)), shares, marker="o", color=color, label=name)
    axes.set(
        yscale="log",
        title="64 names a step, cut under a budget of tokens",
        xlabel="tokens in a micro-batch",
        ylabel="gradient off, share of its size",
        xticks=range(len(BUDGETS)),
        xticklabels=BUDGETS,
    )
    axes.legend(frameon=False, loc="center right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main() -> None:
    mpl.use("Agg")
    (run,) = map(Path, sys.argv[1:])
    checkpoint = torch.load(
        run / "checkpoints" / "last.ckpt", map_location="cpu", weights_only=False
    )
    module, data = NameVAE(), Names()
    module.load_state_dict(checkpoint["state_dict"])
    data.setup("fit")
    loader = iter(data.train_dataloader())
    batches = [data.with_noise(next(loader), epoch=0) for _ in range(NUM_BATCHES)]
    found = measure(module, batches)
    print(f"| tokens in a micro-batch | {' | '.join(map(str, BUDGETS))} |")
    print(f"|---|{'---:|' * len(BUDGETS)}")
    for name, shares in found.items():
        cells = [f"{x:.1%}" if x > 1e-3 else f"{x:.0e}" for x in shares]
        print(f"| {name} | {' | '.join(cells)} |")
    draw(found, Path(__file__).with_name("multi_term.png"))


if __name__ == "__main__":
    main()
