"""What each policy for BatchNorm is worth: the table of the benchmarks' README.

    python -m tests.benchmarks.batch_norm [--seeds 6] [--epochs 12]

A small convolutional net on scikit-learn's digits, micro-batches of 4, windows of 16
(an effective batch of 64), SGD with momentum and a cosine schedule; and the same with
batches of 64. A third of the digits validate: after a third of the training, while the
weights move fast, and at its end.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import statistics
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.benchmarks.measuring import asked, table
from tests.helpers import quiet_lightning, trainer
from trainkit import AccumulationCallback, BatchNormGuard, PerSample

MICRO_BATCH, WINDOW = 4, 16
NUM_TRAINED = 1200


def data() -> tuple[TensorDataset, TensorDataset]:
    digits: Any = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    return (
        TensorDataset(images[:NUM_TRAINED], labels[:NUM_TRAINED]),
        TensorDataset(images[NUM_TRAINED:], labels[NUM_TRAINED:]),
    )


class Digits(pl.LightningModule):
    """Four convolutions, each with a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        channels = (1, 16, 16, 32, 32)
        blocks: list[nn.Module] = []
        for i, (ins, outs) in enumerate(itertools.pairwise(channels)):
            conv = nn.Conv2d(ins, outs, 3, 2 if i == 2 else 1, padding=1, bias=False)
            blocks += [conv, nn.BatchNorm2d(outs), nn.ReLU()]
        ends = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)]
        self.net = nn.Sequential(*blocks, *ends)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.net(batch[0])
        right = (logits.argmax(1) == batch[1]).float().mean()
        self.log("accuracy", right, batch_size=len(batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Accuracies(pl.Callback):
    """Keeps the accuracy of each epoch."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.found.append(float(trainer.callback_metrics["accuracy"]))


def fit(
    guard: Any, *, micro_batch: int, window: int, seed: int, epochs: int
) -> list[float]:
    """Accuracy, after each epoch, on the digits that are not trained on."""
    torch.manual_seed(seed)
    module = Digits()
    trained, validated = data()
    generator = torch.Generator().manual_seed(seed)
    train = DataLoader(trained, micro_batch, shuffle=True, generator=generator)
    accuracies = Accuracies()
    callbacks: list[pl.Callback] = [AccumulationCallback(PerSample()), accuracies]
    if guard is not None:
        callbacks.append(guard)
    fitted = trainer(window, max_epochs=epochs, callbacks=callbacks)
    with contextlib.redirect_stdout(io.StringIO()):
        fitted.fit(module, train, DataLoader(validated, 100))
    return accuracies.found


GUARDS: dict[str, Any] = {
    "plain accumulation": lambda: None,
    "`momentum`": lambda: BatchNormGuard("momentum"),
    "`recalibrate`, all passes": lambda: BatchNormGuard("recalibrate"),
    "`recalibrate`, one pass": lambda: BatchNormGuard("recalibrate", exact=False),
    "`freeze` (as initialised)": lambda: BatchNormGuard("freeze"),
    "`group_norm`": lambda: BatchNormGuard("group_norm"),
}


def main() -> None:
    options = asked(__doc__, seeds=6, epochs=12)
    seeds, epochs = options.seeds, options.epochs
    early = epochs // 3
    table("mean (worst to best seed)", f"{early} epochs", f"{epochs} epochs")
    sizes = {"micro_batch": MICRO_BATCH, "window": WINDOW}
    big = {"micro_batch": MICRO_BATCH * WINDOW, "window": 1}
    rows = [(name, make, sizes) for name, make in GUARDS.items()]
    rows.append(("the big batch, 64 x 1", lambda: None, big))
    for name, make, how in rows:
        curves = [fit(make(), **how, seed=n, epochs=epochs) for n in range(seeds)]
        at_first, at_last = ([c[n - 1] for c in curves] for n in (early, epochs))
        print(f"| {name} | {spread(at_first)} | {spread(at_last)} |", flush=True)


def spread(accuracies: list[float]) -> str:
    mean = statistics.mean(accuracies)
    return f"{mean:.1%} ({min(accuracies):.1%} to {max(accuracies):.1%})"


if __name__ == "__main__":
    with quiet_lightning(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main()
