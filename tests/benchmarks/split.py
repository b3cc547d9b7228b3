"""What cutting by length gains: real tokens a second, for the same windows.

    python -m tests.benchmarks.split [--windows 6] [--rounds 3] [--lengths lognormal]

A two-layer transformer trains on windows of 64 sequences, once by plain Lightning in
micro-batches of 8 in their order, once in split windows under several budgets of
tokens, and once with `MicroBatching("auto")`. All run in one process, round after
round, each round in an order of its own; what counts is the median over rounds of
ratios within a round. The gradient of a window is compared with that of the window as
one batch. Lengths are "lognormal", "uniform" or "cubed"; "auto" searches in as many
windows of its own as `--auto` says.
"""

from __future__ import annotations

import contextlib
import gc
import io
import random
import time
import warnings
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.benchmarks.measuring import SMOOTH, Transformer, asked
from tests.helpers import gradients, quiet_lightning, trainer
from trainkit import AccumulationMixin, MicroBatching, PerToken

WINDOW = 64
LONGEST = 1024
VOCABULARY = 512
BUDGETS = (1024, 2048, 4096, 8192, 16384)

DRAWS: dict[str, Callable[[random.Random], float]] = {
    "lognormal": lambda r: r.lognormvariate(5, 0.9),
    "uniform": lambda r: r.uniform(1, LONGEST),
    "cubed": lambda r: LONGEST * r.random() ** 3,
}


def sequences(lengths: str, number: int, seed: int = 0) -> list[Tensor]:
    """Sequences of one of the three distributions of lengths."""
    draw, source = DRAWS[lengths], random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    drawn = [min(LONGEST, max(2, int(draw(source)))) for _ in range(number)]
    return [torch.randint(VOCABULARY, (n,), generator=generator) for n in drawn]


def collate(samples: Sequence[Tensor]) -> dict[str, Tensor]:
    pad = nn.utils.rnn.pad_sequence
    ids = pad(list(samples), batch_first=True)
    ones = [torch.ones_like(sample) for sample in samples]
    labels = [(3 * sample + 1) % VOCABULARY for sample in samples]
    return {
        "ids": ids,
        "attention_mask": pad(ones, batch_first=True),
        "labels": pad(labels, batch_first=True, padding_value=-100),
    }


class Plain(pl.LightningModule):
    """Times its own training, without the set-up."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = Transformer(VOCABULARY, VOCABULARY, **SMOOTH)
        self.times: list[float] = []
        self.first: Tensor | None = None

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.net(batch["ids"], batch["attention_mask"]).flatten(0, 1)
        return F.cross_entropy(logits, batch["labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_train_start(self) -> None:
        self.times = [time.perf_counter()]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.first is None:
            self.first = gradients(self)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.times.append(time.perf_counter())


class Mixed(AccumulationMixin, Plain):
    accumulation = PerToken()


def run(module: Plain, data: list[Tensor], batch_size: int, accumulate: int) -> float:
    """The seconds that a training takes, its set-up left aside."""
    loader = DataLoader(data, batch_size=batch_size, collate_fn=collate)  # type: ignore[arg-type]
    gc.collect()
    with contextlib.redirect_stdout(io.StringIO()):
        trainer(accumulate, max_epochs=1).fit(module, loader)
    return module.times[-1] - module.times[0]


def run_split(data: list[Tensor], **how: Any) -> tuple[float, Mixed]:
    module = Mixed()
    module.micro_batching = MicroBatching(**how)
    return run(module, data, WINDOW, 1), module


def exact_gradient(data: list[Tensor]) -> Tensor:
    """Of the first window as one batch."""
    module = Plain()
    module.training_step(collate(data[:WINDOW]), 0).backward()
    return gradients(module)


def deviation(module: Plain, exact: Tensor) -> float:
    assert module.first is not None
    return float((module.first - exact).norm() / exact.norm())


def measure(lengths: str, windows: int, rounds: int) -> None:
    data = sequences(lengths, windows * WINDOW)
    real = sum(map(len, data))
    exact = exact_gradient(data)
    rates: dict[str, list[float]] = {}
    off: dict[str, float] = {}

    def plain() -> None:
        module = Plain()
        note("plain, 8 in order", run(module, data, 8, WINDOW // 8), module)

    def split(budget: int) -> None:
        note(f"budget {budget:,}", *run_split(data, tokens=budget))

    def note(name: str, seconds: float, module: Plain) -> None:
        rates.setdefault(name, []).append(real / seconds)
        off[name] = deviation(module, exact)

    contestants = [plain, *[lambda b=b: split(b) for b in BUDGETS]]
    for _ in range(rounds):
        for contestant in random.sample(contestants, len(contestants)):
            contestant()
    reference = rates["plain, 8 in order"]
    print(f"\n{lengths}: {windows} windows of {WINDOW}, {real:,} real tokens")
    print(f"{'':20}{'tokens/s':>10}{'/ plain':>9}{'gradient off':>14}")
    for name in sorted(rates, key=_budget):
        ratio = median(a / b for a, b in zip(rates[name], reference, strict=True))
        print(f"{name:20}{median(rates[name]):10.0f}{ratio:9.2f}{off[name]:14.1e}")


def measure_auto(lengths: str, windows: int) -> None:
    """What `"auto"` chooses, and how long it searches."""
    seconds, module = run_split(sequences(lengths, windows * WINDOW, seed=1))
    fitted: Any = module.trainer
    found = [getattr(each, "split", None) for each in fitted.callbacks]
    search = next(each for each in found if each is not None).sizes.search
    still = " (still searching)" if search.is_searching else ""
    print(f"auto chose {search.limit:,} in {windows} windows, {seconds:.0f} s{still}")


def _budget(name: str) -> int:
    digits = name.removeprefix("budget ").replace(",", "")
    return int(digits) if digits.isdigit() else 0


def main() -> None:
    options = asked(__doc__, windows=6, rounds=3, auto=40, lengths="lognormal")
    warnings.simplefilter("ignore")
    with quiet_lightning():
        measure(options.lengths, options.windows, options.rounds)
        measure_auto(options.lengths, options.auto)


if __name__ == "__main__":
    main()
