"""Manual optimization with several optimizers, each with a window of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.helpers import (
    NAIVE,
    TOLERANCE,
    deviation,
    loader,
    pad,
    ragged_sequences,
    raise_rank_errors,
    rank_loader,
    run_ranks,
    trainer,
    weights,
)
from trainkit import AccumulationMixin, PerSample, PerToken
from trainkit.errors import TrainkitError

EXACT = TOLERANCE[torch.float64]
DATA = ragged_sequences(38)  # ten batches of four, the last of two
SHARED = ragged_sequences(36)
BATCH = 4


class Gan(AccumulationMixin, pl.LightningModule):
    """A generator in windows of two batches, a discriminator in windows of three.

    The generator's loss runs through the discriminator, and the other way round not.
    """

    accumulation = PerToken()
    lengths = (2, 3)

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.generator = nn.Linear(1, 4, dtype=torch.float64)
            self.discriminator = nn.Linear(4, 1, dtype=torch.float64)

    def loss(self, batch: Any, index: int) -> Tensor:
        made = self.generator(batch["ids"].unsqueeze(-1).double() / 13)
        made = made.detach() if index == 1 else made
        target = 1.0 if index == 0 else 0.3
        error = (self.discriminator(torch.tanh(made)).squeeze(-1) - target).square()
        return error[batch["labels"] != -100].mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for index, optimizer in enumerate(self.optimizers()):  # type: ignore[arg-type]
            self.toggle_optimizer(optimizer)
            self.accumulate(self.loss(batch, index), batch, optimizer=optimizer)
            if self.window_ends(batch_idx, self.lengths[index]):
                self.finish_window(optimizer)
                optimizer.step()
                optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=0.05),
            torch.optim.Adam(self.discriminator.parameters(), lr=0.05),
        ]


def big_batch_gan(batches: Sequence[Any], epochs: int = 2) -> Gan:
    """In order of batches; each window's gradient is a sum over its tokens, divided
    once. Weights move inside the other optimizer's window, as they do in training."""
    gan = Gan()
    optimizers = gan.configure_optimizers()
    sums: list[list[Tensor]] = [[], []]
    counts = [0, 0]
    for _ in range(epochs):
        for number, batch in enumerate(batches, 1):
            count = int((batch["labels"] != -100).sum())
            for index, part in enumerate((gan.generator, gan.discriminator)):
                loss = gan.loss(batch, index) * count
                new = torch.autograd.grad(loss, list(part.parameters()))
                old = sums[index] or [torch.zeros_like(g) for g in new]
                sums[index] = [a + b for a, b in zip(old, new, strict=True)]
                counts[index] += count
                if number % gan.lengths[index] == 0 or number == len(batches):
                    for p, g in zip(part.parameters(), sums[index], strict=True):
                        p.grad = g / counts[index]
                    optimizers[index].step()
                    sums[index], counts[index] = [], 0
    return gan


BATCHES = [pad(DATA[i : i + BATCH]) for i in range(0, len(DATA), BATCH)]


def test_two_optimizers_with_windows_of_their_own_equal_big_batches() -> None:
    """lightning#8284: a toggle left over from the other optimizer lost gradients."""
    gan = Gan()
    trainer().fit(gan, loader(DATA, BATCH))
    assert deviation(gan, big_batch_gan(BATCHES), Gan()) <= EXACT
    assert all(p.requires_grad for p in gan.parameters())


def test_two_optimizers_without_toggle_leave_gradients_in_each_other() -> None:
    """The generator's loss, not toggled, adds to the discriminator's window."""

    class Untoggled(Gan):
        def toggle_optimizer(self, optimizer: Any) -> None: ...
        def untoggle_optimizer(self, optimizer: Any) -> None: ...

    gan = Untoggled()
    trainer().fit(gan, loader(DATA, BATCH))
    assert deviation(gan, big_batch_gan(BATCHES), Gan()) > NAIVE


def train_gan_ranks(rank: int, world: int) -> Tensor:
    gan = Gan()
    trainer(
        strategy="ddp_find_unused_parameters_true",
        devices=world,
        use_distributed_sampler=False,
    ).fit(gan, rank_loader(SHARED, BATCH, rank, world))
    return weights(gan)


def test_two_optimizers_on_two_ranks_equal_one_process() -> None:
    shares = [SHARED[rank::2] for rank in range(2)]
    joint = [
        pad(shares[0][i : i + BATCH] + shares[1][i : i + BATCH])
        for i in range(0, len(shares[0]), BATCH)
    ]
    ends = raise_rank_errors(run_ranks(train_gan_ranks, 2))
    reference = big_batch_gan(joint)
    assert max(deviation(end, reference, Gan()) for end in ends) <= EXACT


def test_several_optimizers_must_be_named() -> None:
    class Nameless(Gan):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.accumulate(self.loss(batch, 0), batch)

    with pytest.raises(TrainkitError, match="must be named where there are .* are 2"):
        trainer().fit(Nameless(), loader(DATA, BATCH))


# ---- one scaler, one loss ------------------------------------------------------------


class Scalars(AccumulationMixin, pl.LightningModule):
    """Two weights, each with an optimizer and a window of its own; the gradient of each
    window is 2 by the law, whatever the scaler does."""

    accumulation = PerSample()

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first = nn.Parameter(torch.ones(()))
        self.second = nn.Parameter(torch.ones(()))
        self.seen: dict[str, list[float]] = {"first": [], "second": []}

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([p], lr=0.0) for p in (self.first, self.second)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for name, optimizer in zip(self.seen, self.optimizers(), strict=True):  # type: ignore[arg-type]
            parameter = getattr(self, name)
            self.accumulate(2 * parameter, batch, optimizer=optimizer)
            every = 2 if name == "first" else 4
            if self.window_ends(batch_idx, every):
                self.finish_window(optimizer)
                optimizer.step()
                optimizer.zero_grad()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        (parameter,) = optimizer.param_groups[0]["params"]
        name = "first" if parameter is self.first else "second"
        self.seen[name].append(float(parameter.grad))


@pytest.mark.parametrize("growth_interval", [1, 3, 1000])
def test_windows_that_share_a_scaler_equal_the_law(growth_interval: int) -> None:
    """The scaler's factor changes inside the longer window when the other one steps."""
    scaler: Any = torch.amp.GradScaler(
        "cpu", init_scale=16.0, growth_interval=growth_interval
    )
    precision = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
    module = Scalars()
    batches = DataLoader(torch.ones(24, 1), batch_size=3)  # type: ignore[arg-type]
    trainer(plugins=[precision], max_epochs=1).fit(module, batches)
    assert module.seen == {"first": [2.0] * 4, "second": [2.0] * 2}


class OneLoss(Scalars):
    """One loss trains the parameters of both optimizers."""

    both = True

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        loss = 2 * batch.mean() * (self.first + self.second)
        self.accumulate(loss, batch, optimizer=first)
        if self.window_ends(batch_idx, 4):
            self.finish_window([first, second] if self.both else first)
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()


class HalfClosed(OneLoss):
    both = False


def test_one_loss_for_two_optimizers_equals_the_law() -> None:
    module = OneLoss()
    batches = [torch.ones(3, 1), *[torch.ones(50, 1)] * 3]
    trainer(max_epochs=1).fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    assert module.seen == {"first": [2.0], "second": [2.0]}


def test_optimizer_left_out_of_the_division_is_told() -> None:
    batches = DataLoader([torch.ones(3, 1)] * 4, batch_size=None)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="optimizer 1: it stepped with gradients that"):
        trainer(max_epochs=1).fit(HalfClosed(), batches)
