"""Schedules: the windows that a plan implies, and the big batch over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from tests.helpers import (
    OPTIMIZERS,
    TokenNet,
    deviation,
    pad,
    ragged_sequences,
    trainer,
    weights,
)
from tests.lit.fronts import RAGGED, Mixed, Plain, cut, micro_batches, plain_token_loss
from tests.zoo.modules import Manual
from trainkit import AccumulationCallback, AccumulationSchedule, PerToken

SEQUENCES = ragged_sequences(38)
START = weights(Plain())
EPOCHS = 3
EXACT = 1e-10
FRONTS = ("mixin", "callback", "manual")

Sizes = Mapping[int, int]
Rows = Sequence[Sequence[Any]]
Windows = Sequence[Sequence[range]]

PLANS: dict[str, tuple[Sizes, Any]] = {
    "fewer by epoch": ({0: 4, 1: 2, 2: 1}, "epoch"),
    "more by epoch": ({0: 1, 1: 3, 2: 7}, "epoch"),
    "longer than the epoch": ({0: 3, 1: 25}, "epoch"),
    "one to four in mid-epoch": ({0: 1, 3: 4}, "step"),
    "up and down in mid-epoch": ({0: 2, 2: 3, 4: 1, 6: 5, 9: 2}, "step"),
    "every step another": ({i: 1 + i * 2 % 5 for i in range(20)}, "step"),
    "by tokens": ({0: 1, 60: 3, 200: 2, 700: 4}, "tokens"),
    "down by tokens": ({0: 5, 300: 1}, "tokens"),
}
"""Sizes that divide nothing, over epochs of ten micro-batches."""


def rows_of(sizes: Sequence[int] = RAGGED) -> Rows:
    """The samples of each micro-batch."""
    return [[SEQUENCES[i] for i in indices] for indices in cut(SEQUENCES, sizes)]


def token_counts(rows: Rows | None = None) -> list[int]:
    """The tokens of each micro-batch of an epoch."""
    return [sum(len(ids) for ids, _ in row) for row in rows or rows_of()]


def windows_of_plan(
    plan: Sizes,
    unit: str,
    rows: Rows | None = None,
    *,
    epochs: int = EPOCHS,
    max_steps: float = float("inf"),
    begun: Windows = (),
) -> list[list[range]]:
    """For each epoch its windows, after those that are begun, as ranges of rows."""
    tokens = token_counts(rows)
    made: list[list[range]] = []
    weighed: list[int] = []
    for epoch in range(epochs):
        made.append([*begun[epoch]] if epoch < len(begun) else [])
        weighed += [sum(tokens[i] for i in window) for window in made[-1]]
        first = made[-1][-1].stop if made[-1] else 0
        while first < len(tokens) and len(weighed) < max_steps:
            at = {"epoch": epoch, "step": len(weighed), "tokens": sum(weighed[:-1])}
            size = plan[max(start for start in plan if start <= at[unit])]
            window = range(first, min(first + size, len(tokens)))
            made[-1].append(window)
            weighed.append(sum(tokens[i] for i in window))
            first = window.stop
    return made


def number_of(windows: Windows) -> int:
    return sum(map(len, windows))


def ends_of(windows: Windows, batches: int = 10) -> list[int]:
    """The last batch of each window, counted over all epochs."""
    return [batches * n + w.stop - 1 for n, ws in enumerate(windows) for w in ws]


def off(
    module: Any,
    windows: Windows,
    rows: Rows | None = None,
    *,
    optimizer: str = "adamw",
    left_out: AbstractSet[int] = frozenset(),
) -> float:
    """How far off the reference: every window as one batch, in a loop of torch alone.

    Micro-batches that are left out weigh nothing.
    """
    net, rows = TokenNet(dtype=torch.float64), rows or rows_of()
    stepper = OPTIMIZERS[optimizer](net.parameters())
    for window in (w for ws in windows for w in ws):
        samples = [each for i in window if i not in left_out for each in rows[i]]
        stepper.zero_grad()
        if samples:
            plain_token_loss(net, pad(samples)).backward()
            stepper.step()
    return deviation(module, weights(net), START)


def make(front: str, **options: Any) -> tuple[Any, list[Any]]:
    """A module, and the callback that it needs."""
    options = {"optimizer": "adamw", **options}
    if front == "callback":
        return Plain(**options), [AccumulationCallback(PerToken())]
    return (Manual if front == "manual" else Mixed)(**options), []


def schedule(plan: str) -> AccumulationSchedule:
    sizes, unit = PLANS[plan]
    return AccumulationSchedule(sizes, unit=unit)


def fitted(
    front: str,
    *callbacks: pl.Callback,
    loader: Any = None,
    module: Any = None,
    resume: Any = None,
    accumulate: int = 1,
    **options: Any,
) -> tuple[Any, pl.Trainer]:
    """Trained with callbacks, over the ragged micro-batches."""
    made, ours = make(front)
    module = module or made
    options = {"max_epochs": EPOCHS, "callbacks": [*ours, *callbacks], **options}
    fit = trainer(accumulate, **options)
    data = micro_batches(SEQUENCES) if loader is None else loader
    fit.fit(module, data, ckpt_path=resume, weights_only=True if resume else None)
    return module, fit


def schedule_of(module: Any) -> AccumulationSchedule:
    """The schedule among the callbacks of a module's Trainer."""
    callbacks = module.trainer.callbacks
    return next(c for c in callbacks if isinstance(c, AccumulationSchedule))


def batches(size: int = 4, **options: Any) -> DataLoader[Any]:
    """A loader that announces its batch size."""
    return DataLoader(SEQUENCES, batch_size=size, collate_fn=pad, **options)  # type: ignore[arg-type]


class Watch(pl.Callback):
    """Writes down where windows begin and end, and what everybody reads as N."""

    def __init__(self) -> None:
        self.batch = -1
        self.whole = 0.0
        self.stepped: list[int] = []
        self.zeroed: list[int] = []
        self.sizes: list[int] = []
        self.sizes_of_epochs: list[int] = []
        self.losses: list[tuple[float, float]] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.sizes_of_epochs.append(trainer.accumulate_grad_batches)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.batch += 1
        with torch.no_grad():
            self.whole = float(plain_token_loss(pl_module.net, batch))

    def on_before_zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self.zeroed.append(self.batch)

    def on_before_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.stepped.append(self.batch)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.sizes.append(trainer.accumulate_grad_batches)
        if outputs:
            shown = float(outputs["loss"]) * trainer.accumulate_grad_batches
            self.losses.append((shown, self.whole))
