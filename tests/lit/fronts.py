"""Ways to train the same thing: mixin, callback, a plain loop, and the big batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.helpers import OPTIMIZERS, TokenNet, pad, trainer, weights
from tests.zoo import Mixed, Plain, plain_token_loss, sample_loss
from trainkit import (
    AccumulationCallback,
    AccumulationStrategy,
    Accumulator,
    PerSample,
    PerToken,
    Uniform,
)
from trainkit.core.strategies import LossReduction
from trainkit.lit.windows.callback import WindowCallback

Front = Literal["mixin", "callback", "loop"]
Clip = Literal["norm", "value"] | None
Reduction = Literal["mean", "sum"]

CLIP_AT = {"norm": 0.1, "value": 0.01}
WINDOW = 4
RAGGED = (5, 1, 8, 3, 2, 7, 1, 4, 6, 1)
"""Samples in each of 10 micro-batches: two full windows and a short one."""
EQUAL = (4,) * 10


def cut(sequences: Sequence[Any], sizes: Sequence[int]) -> list[list[int]]:
    """The indices of each micro-batch, for `DataLoader(batch_sampler=...)`."""
    indices = iter(range(len(sequences)))
    return [[next(indices) for _ in range(size)] for size in sizes]


def micro_batches(
    sequences: Sequence[Any], sizes: Sequence[int] = RAGGED
) -> DataLoader[Any]:
    """A loader of micro-batches of the given sizes."""
    return DataLoader(
        sequences,  # type: ignore[arg-type]
        batch_sampler=cut(sequences, sizes),
        collate_fn=pad,
    )


def merged(sizes: Sequence[int], window: int = WINDOW) -> list[int]:
    """The sizes of the big batches."""
    return [sum(sizes[i : i + window]) for i in range(0, len(sizes), window)]


LOSSES: dict[str, Callable[..., Tensor]] = {
    "PerSample": sample_loss,
    "PerToken": plain_token_loss,
    "Uniform": sample_loss,
}


def make_strategy(name: str, reduction: Reduction = "mean") -> AccumulationStrategy:
    if name == "Uniform":
        return SumOfEqualBatches() if reduction == "sum" else Uniform()
    made = {"PerSample": PerSample, "PerToken": PerToken}[name]
    return made(loss_reduction=reduction)


class SumOfEqualBatches(AccumulationStrategy):
    """`Uniform` over micro-batches of four, whose training_step returns the sum."""

    loss_reduction: LossReduction = "sum"

    def weight(self, batch: Any) -> int:
        return 4


@dataclass
class Run:
    """What a training went through."""

    start: Tensor
    ends: list[Tensor] = field(default_factory=list)
    """The weights after each epoch."""
    losses: list[float] = field(default_factory=list)
    """The mean loss of each window."""

    @property
    def end(self) -> Tensor:
        return self.ends[-1]

    def deviations(self, reference: Run) -> list[float]:
        """After each epoch, as a share of the distance travelled."""
        pairs = zip(self.ends, reference.ends, strict=True)
        return [
            float((mine - theirs).norm() / (theirs - self.start).norm())
            for mine, theirs in pairs
        ]


class Recorder(pl.Callback):
    """Writes down a `Run`."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_before_optimizer_step(
        self, trainer: Any, pl_module: Any, optimizer: Any
    ) -> None:
        window = windows_of(trainer).last_window
        assert window is not None
        self.run.losses.append(float(window.loss))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.run.ends.append(weights(pl_module))


def windows_of(trainer: Any) -> WindowCallback:
    """The callback that divides."""
    return next(c for c in trainer.callbacks if isinstance(c, WindowCallback))


def clip_(net: nn.Module, clip: Clip) -> None:
    if clip == "norm":
        nn.utils.clip_grad_norm_(net.parameters(), CLIP_AT["norm"])
    elif clip == "value":
        nn.utils.clip_grad_value_(net.parameters(), CLIP_AT["value"])


def clip_options(clip: Clip) -> dict[str, Any]:
    """The same, for a Trainer."""
    if clip is None:
        return {}
    return {"gradient_clip_val": CLIP_AT[clip], "gradient_clip_algorithm": clip}


def batches_of(
    sequences: Sequence[Any], sizes: Sequence[int]
) -> Iterator[dict[str, Tensor]]:
    return iter(micro_batches(sequences, sizes))


def big_batch(
    sequences: Sequence[Any],
    sizes: Sequence[int] = RAGGED,
    loss: Callable[..., Tensor] = plain_token_loss,
    *,
    window: int = WINDOW,
    optimizer: str = "sgd",
    clip: Clip = None,
    epochs: int = 2,
    dtype: torch.dtype = torch.float64,
) -> Run:
    """The reference: every window as one batch, in a loop of torch alone."""
    net = TokenNet(dtype=dtype)
    run = Run(weights(net))
    stepper = OPTIMIZERS[optimizer](net.parameters())
    for _ in range(epochs):
        for batch in batches_of(sequences, merged(sizes, window)):
            stepper.zero_grad()
            value = loss(net, batch)
            value.backward()
            clip_(net, clip)
            stepper.step()
            run.losses.append(value.item())
        run.ends.append(weights(net))
    return run


def by_loop(
    strategy: AccumulationStrategy,
    sequences: Sequence[Any],
    sizes: Sequence[int] = RAGGED,
    loss: Callable[..., Tensor] = plain_token_loss,
    *,
    window: int = WINDOW,
    optimizer: str = "sgd",
    clip: Clip = None,
    epochs: int = 2,
    dtype: torch.dtype = torch.float64,
) -> Run:
    """A plain loop with an `Accumulator`."""
    net = TokenNet(dtype=dtype)
    run = Run(weights(net))
    stepper = OPTIMIZERS[optimizer](net.parameters())
    accumulator = Accumulator(strategy)
    for _ in range(epochs):
        for i, batch in enumerate(batches_of(sequences, sizes), 1):
            accumulator.backward(loss(net, batch, strategy.loss_reduction), batch)
            if i % window == 0 or i == len(sizes):
                run.losses.append(float(accumulator.finish(stepper).loss))
                clip_(net, clip)
                stepper.step()
                stepper.zero_grad()
        run.ends.append(weights(net))
    return run


def by_trainer(
    front: Front,
    strategy: AccumulationStrategy,
    sequences: Sequence[Any],
    sizes: Sequence[int] = RAGGED,
    loss: Callable[..., Tensor] = plain_token_loss,
    *,
    window: int = WINDOW,
    optimizer: str = "sgd",
    clip: Clip = None,
    epochs: int = 2,
    dtype: torch.dtype = torch.float64,
) -> Run:
    """A Lightning Trainer, with the mixin or the callback."""
    made = Mixed if front == "mixin" else Plain
    module = made(
        loss, optimizer=optimizer, reduction=strategy.loss_reduction, dtype=dtype
    )
    run = Run(weights(module))
    callbacks: list[pl.Callback] = [Recorder(run)]
    if isinstance(module, Mixed):
        module.accumulation = strategy
    else:
        callbacks.append(AccumulationCallback(strategy))
    options = {"max_epochs": epochs, "callbacks": callbacks, **clip_options(clip)}
    trainer(window, **options).fit(module, micro_batches(sequences, sizes))
    return run


def train(front: Front, strategy: AccumulationStrategy, *data: Any, **how: Any) -> Run:
    """Train by one of the three fronts."""
    if front == "loop":
        return by_loop(strategy, *data, **how)
    return by_trainer(front, strategy, *data, **how)
