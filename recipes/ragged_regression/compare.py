"""The table and picture of README.md: one training, cut in several ways.

    python -m recipes.ragged_regression.compare

All trainings start from equal weights and see equal rows in equal order. The first has
batches of 32. The others have windows of 2 x 16, 4 x 8 and 8 x 4: by plain Lightning,
by the mean of means, without the last batch, and with the weights of batches. All
should end with the weights of the first.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import lightning.pytorch as pl
import matplotlib as mpl
import torch
from lightning.pytorch import LightningModule
from matplotlib import pyplot as plt
from torch import Tensor
from trainkit.recipes.ragged_regression import Diabetes, Regression  # type: ignore[import-not-found]

from trainkit import AccumulationStrategy, Uniform

WINDOW = 32
SIZES = (16, 8, 4)
EPOCHS = 10


class Trained(Regression):
    """The recipe's module with an optimizer."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Plain(LightningModule):
    """A module that trains as `Trained` does, without trainkit."""

    def __init__(self, inner: Trained) -> None:
        super().__init__()
        self.net = inner.net
        self.forward = inner.forward
        self.training_step = inner.training_step

    configure_optimizers = Trained.configure_optimizers


# ---- training ------------------------------------------------------------------------


def train(
    size: int,
    *,
    drop_last: bool = False,
    strategy: AccumulationStrategy | None = None,
    is_plain: bool = False,
) -> Tensor:
    """The weights at the end; the default strategy is the recipe's own."""
    torch.manual_seed(0)
    module = Trained()
    if strategy is not None:
        module.accumulation = strategy
    trained: LightningModule = Plain(module) if is_plain else module
    data = Diabetes(batch_size=size, drop_last=drop_last)
    data.setup("fit")
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        accumulate_grad_batches=WINDOW // size,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(trained, data.train_dataloader())
    return weights(module)


def weights(module: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in module.parameters()])


def measure() -> dict[str, list[float]]:
    """The distance from the big batch as a share of the distance travelled."""
    torch.manual_seed(0)
    start, big = weights(Trained()), train(WINDOW)
    ways = {
        "plain Lightning": {"is_plain": True},
        "Uniform()": {"strategy": Uniform()},
        "drop_last": {"drop_last": True},
        "PerSample()": {},
    }
    return {
        name: [
            float((train(size, **how) - big).norm() / (big - start).norm())
            for size in SIZES
        ]
        for name, how in ways.items()
    }


# ---- table and picture ---------------------------------------------------------------


def shown(share: float) -> str:
    return f"{share:.1%}" if share > 1e-3 else f"{share:.0e}"


def draw(found: dict[str, list[float]], path: Path) -> None:
    colors = ("#c44e52", "#dd8452", "#8c8c8c", "#55a868")
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for place, (name, shares) in enumerate(found.items()):
        at = [x + 0.19 * (place - 1.5) for x in range(len(SIZES))]
        axes.bar(at, shares, width=0.18, label=name, color=colors[place])
    axes.set(
        yscale="log",
        ylabel="weights off, share of the way",
        title=f"346 rows, windows of {WINDOW}, {EPOCHS} epochs: how far from batches "
        f"of {WINDOW}?",
        xticks=range(len(SIZES)),
        xticklabels=[f"{WINDOW // size} batches of {size}" for size in SIZES],
    )
    axes.legend(frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.1))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main() -> None:
    mpl.use("Agg")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # Lightning's advice on workers and the like
    found = measure()
    cuts = " | ".join(f"{WINDOW // size} x {size}" for size in SIZES)
    print(f"| weights off the big batch | {cuts} |\n|---|{'---:|' * len(SIZES)}")
    for name, shares in found.items():
        print(f"| {name} | {' | '.join(map(shown, shares))} |")
    draw(found, Path(__file__).with_name("ragged_regression.png"))


if __name__ == "__main__":
    main()
