"""What the proof at the start of a training costs, and what `check` costs.

    python -m tests.benchmarks.proof [--rounds 5]

Each round trains two steps and times, in one run: the proof before the first step, and
the second step, from its first batch to its end. The figure is the median of their
ratios. `check` runs once on each model.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

import trainkit
from tests.benchmarks.measuring import Transformer, asked, convolutions, table
from tests.helpers import quiet_lightning, trainer
from trainkit import AccumulationCallback, PerSample
from trainkit.lit.proof.start import ProofAtStart

ACCUMULATE = 4


class Classifier(LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], int]] = {
    "tiny MLP, 4 x 8 rows": (
        lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10)),
        lambda: torch.randn(16),
        8,
    ),
    "convolutions, 4 x 16 images of 64 x 64": (
        lambda: convolutions((2, 2, 2), 10),
        lambda: torch.randn(3, 64, 64),
        16,
    ),
    "2-layer transformer, 4 x 8 rows of 128": (
        lambda: Transformer(1000, 10, pools=True),
        lambda: torch.randint(0, 1000, (128,)),
        8,
    ),
    "12-layer transformer, 10 million parameters, 4 x 8 rows of 128": (
        lambda: Transformer(1000, 10, layers=12, width=256, pools=True),
        lambda: torch.randint(0, 1000, (128,)),
        8,
    ),
}


class SecondStep(Callback):
    """The time of the second step."""

    began = took = 0.0

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == ACCUMULATE:
            self.began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 2 * ACCUMULATE - 1:
            self.took = time.perf_counter() - self.began


def measured(name: str) -> tuple[float, float]:
    """The seconds of the proof and of a step."""
    make, row, size = MODELS[name]
    rows = [(row(), n % 10) for n in range(2 * ACCUMULATE * size)]
    times: list[float] = []
    plain = ProofAtStart.run

    def timed(proof: ProofAtStart, *args: Any, **kwargs: Any) -> None:
        began = time.perf_counter()
        plain(proof, *args, **kwargs)
        times.append(time.perf_counter() - began)

    step = SecondStep()
    ProofAtStart.run = timed  # type: ignore[method-assign]
    try:
        callbacks = [AccumulationCallback(PerSample()), step]
        fitted = trainer(ACCUMULATE, max_epochs=1, callbacks=callbacks)
        fitted.fit(Classifier(make()), DataLoader(rows, batch_size=size))  # type: ignore[arg-type]
    finally:
        ProofAtStart.run = plain  # type: ignore[method-assign]
    return times[0], step.took


def checked(name: str) -> tuple[float, str]:
    """The seconds of a check, and how far windows were off."""
    make, row, size = MODELS[name]
    loader = DataLoader([(row(), n % 10) for n in range(64)], batch_size=size)  # type: ignore[arg-type]
    began = time.perf_counter()
    report = trainkit.check(Classifier(make()), loader, strategy=PerSample())
    return time.perf_counter() - began, f"{report.deviation:.0e}"


def main() -> None:
    rounds = asked(__doc__, rounds=5).rounds
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    table("model", "proof, ms", "step, ms", "proof / step", "check, s", "off by")
    for name in MODELS:
        with quiet_lightning():
            pairs = [measured(name) for _ in range(rounds)]
            seconds, off = checked(name)
        proof, step = (1000 * median(each) for each in zip(*pairs, strict=True))
        ratio = median(one / other for one, other in pairs)
        times = f"{proof:.0f} | {step:.0f} | {ratio:.2f} | {seconds:.1f}"
        print(f"| {name} | {times} | {off} |")


if __name__ == "__main__":
    main()
