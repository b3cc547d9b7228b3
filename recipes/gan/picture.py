"""The picture of README.md, from the folder of a run.

python -m recipes.gan.picture outputs/gan/2026-11-21_20-47-36-54cf
"""

from __future__ import annotations

import copy
import csv
import sys
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt
from torch import Tensor
from trainkit.recipes.gan import Digits, DigitsGAN  # type: ignore[import-not-found]

from trainkit import AccumulationStrategy, Accumulator, PerSample, Uniform

NUM_SHOWN = 48


def last_window_off(module: DigitsGAN, data: Digits) -> dict[str, float]:
    """For each net, how far a mean of means is from the gradient of an epoch's last
    window, as a share of the gradient's norm."""
    *_, before, last = data.train_dataloader()
    window = [data.with_noise(batch, epoch=0) for batch in (before, last)]

    def gradient(net: str, strategy: AccumulationStrategy) -> Tensor:
        trained = copy.deepcopy(module)
        parameters = list(getattr(trained, net).parameters())
        accumulator = Accumulator(strategy)
        for batch in window:
            accumulator.backward(getattr(trained, f"{net}_loss")(batch), batch)
        accumulator.finish(parameters)
        return torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])

    found = {}
    for net in ("critic", "generator"):
        exact = gradient(net, PerSample())
        found[net] = float((gradient(net, Uniform()) - exact).norm() / exact.norm())
    return found


def distances(run: Path) -> tuple[list[int], list[float]]:
    with (run / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["val/distance"]]
    return [int(row["step"]) // 2 for row in rows], [
        float(row["val/distance"]) for row in rows
    ]


def draw(run: Path, real: Tensor, made: Tensor, path: Path) -> None:
    figure = plt.figure(figsize=(7, 3.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=[1, 1, 1.3])
    for axes, images, title in (
        (left, real, "real digits"),
        (middle, made, "made ones"),
    ):
        tiles = images[:NUM_SHOWN].reshape(8, 6, 8, 8)
        sheet = torch.nn.functional.pad(tiles, (1, 1, 1, 1), value=-1)
        axes.imshow(sheet.transpose(1, 2).reshape(80, 60), cmap="gray_r")
        axes.set(title=title, xticks=[], yticks=[])
    right.plot(*distances(run), color="#4c72b0", marker=".")
    right.set(title="sliced Wasserstein distance", xlabel="steps of each optimizer")
    right.set_ylim(bottom=0)
    right.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main() -> None:
    mpl.use("Agg")
    (run,) = map(Path, sys.argv[1:])
    checkpoint = torch.load(
        run / "checkpoints" / "last.ckpt", map_location="cpu", weights_only=False
    )
    torch.manual_seed(0)
    module, data = DigitsGAN(), Digits()
    module.load_state_dict(checkpoint["state_dict"])
    data.setup("fit")
    print("a mean of means in the last window is off by", last_window_off(module, data))
    made = module(torch.randn(NUM_SHOWN, data.latent))
    real = torch.stack([row["real"] for row in data.val_rows[:NUM_SHOWN]])
    draw(run, real, made, Path(__file__).with_name("gan.png"))


if __name__ == "__main__":
    main()
