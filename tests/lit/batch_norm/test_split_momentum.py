"""Split windows: running statistics forget once a step, however batches are cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.core.batch_norm.nets import momenta
from tests.helpers import raise_rank_errors, run_ranks, trainer
from tests.lit.batch_norm.fits import At
from tests.lit.split.short_of_memory import Memory
from trainkit import AccumulationCallback, BatchNormGuard, MicroBatching, PerSample

pytestmark = pytest.mark.filterwarnings("ignore:accumulate_grad_batches=.*has only")

M, C = 0.1, 3.0
"""The momentum, and what the layers see in every place."""

SIZES = (4, 14, 17, 9, 2)
"""Rows of the loader batches: by fours in 1, 4, 5, 3 and 1 micro-batches."""


class Constant(pl.LightningModule):
    """Its layers see a constant: after k steps of the big batch the running mean is
    C (1 - (1 - m)^k)."""

    def __init__(self, fails: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.rows, self.tokens = nn.BatchNorm1d(2), nn.BatchNorm1d(3)
        self.scale = nn.Parameter(torch.ones(()))
        self.double()
        # In an object of its own, which is not put back when a window is run again.
        self.memory = Memory(calls=fails)
        self.means: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.scale * batch[0]
        ones = torch.ones(len(x), 5, 3, dtype=x.dtype)
        out = self.rows(C * ones[:, :2]).mean()
        out = out + self.tokens(C * ones.flatten(0, 1)).mean()
        self.memory.need("forward", 0, len(x), len(x))
        return x.square().mean() + out

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        layers = (self.rows, self.tokens)
        self.means.append([float(x.running_mean.mean()) for x in layers])  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class OfSizes:
    """Batches of so many rows."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(range(size)) for size in self.sizes])


def data(sizes: tuple[int, ...] = SIZES) -> DataLoader[Any]:
    rows: Any = torch.utils.data.TensorDataset(torch.ones(40, 2, dtype=torch.double))
    return DataLoader(rows, batch_sampler=OfSizes(sizes))


def fit(
    *others: Any,
    guarded: bool = True,
    cut: Any = None,
    window: int = 1,
    sizes: tuple[int, ...] = SIZES,
    module: Any = None,
    **options: Any,
) -> Constant:
    module = module or Constant()
    cut = cut or MicroBatching(size=4)
    callbacks = [AccumulationCallback(PerSample(), micro_batching=cut), *others]
    guard = [BatchNormGuard("momentum")] if guarded else []
    with torch.random.fork_rng():
        fitted = trainer(window, callbacks=[*guard, *callbacks], **options)
        fitted.fit(module, data(sizes))
    return module


def after(steps: int) -> float:
    """The running mean of the big batch after so many steps."""
    return C * (1 - (1 - M) ** steps)


def wanted(num_batches: int, window: int = 1, epochs: int = 2) -> list[float]:
    """It, after each loader batch that ends a window; else None."""
    return [after(step + 1) for step in range(epochs * -(-num_batches // window))]


def at_steps(module: Constant, num_batches: int, window: int = 1) -> list[list[float]]:
    ends = [
        (i % num_batches + 1) % window == 0 or i % num_batches + 1 == num_batches
        for i in range(len(module.means))
    ]
    return [m for m, is_end in zip(module.means, ends, strict=True) if is_end]


def assert_forgets_as_the_big_batch(
    module: Constant, num_batches: int = len(SIZES), window: int = 1
) -> None:
    found = at_steps(module, num_batches, window)
    expected = wanted(num_batches, window)
    for layer in (0, 1):
        means = [each[layer] for each in found]
        assert means == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("sizes", "window"),
    [
        *((SIZES, window) for window in (1, 2, 3)),
        (SIZES[::-1], 2),
        ((14, 2, 17, 9), 3),
        ((3, 3), 1),
    ],
)
def test_forgetting_equals_the_big_batchs(sizes: tuple[int, ...], window: int) -> None:
    """The first window too, one of one part, and the short last one."""
    module = fit(window=window, sizes=sizes)
    assert_forgets_as_the_big_batch(module, len(sizes), window)
    assert set(momenta(module).values()) == {M}


@pytest.mark.parametrize("window", [1, 2])
def test_forgetting_without_the_guard_is_that_of_every_part(window: int) -> None:
    """The negative control."""
    module = fit(guarded=False, window=window)
    assert module.means[-1] == pytest.approx([after(2 * (1 + 4 + 5 + 3 + 1))] * 2)
    with pytest.raises(AssertionError):
        assert_forgets_as_the_big_batch(module, window=window)


@pytest.mark.parametrize(
    ("fails", "window"),
    [((1,), 2), ((0, 2, 5), 1), ((0, 2, 5), 2), ((3, 4, 5), 2), ((0, 1, 2, 3), 1)],
)
def test_forgetting_of_a_window_that_is_run_again(
    fails: tuple[int, ...], window: int
) -> None:
    module = Constant(fails)
    fit(cut=MicroBatching("auto", start=1000), window=window, module=module)
    assert module.memory.num_failures > 0
    assert_forgets_as_the_big_batch(module, window=window)
    assert set(momenta(module).values()) == {M}


@pytest.mark.parametrize("position", [0, 1, 2, 3, 4])
def test_momentum_that_the_user_changes_between_windows_is_theirs(
    position: int,
) -> None:
    def change(trainer: Any, module: Any) -> None:
        if trainer.fit_loop.total_batch_idx == position:
            module.rows.momentum = 0.25

    module = fit(At("on_train_batch_end", change))
    assert momenta(module) == {"rows": 0.25, "tokens": M}


def on_ranks(rank: int, world: int) -> list[float]:
    """Rank 0 runs more micro-batches than rank 1, or fewer."""
    sizes = ((14, 3, 9), (3, 17, 2))[rank]
    module = fit(
        sizes=sizes, strategy="ddp", devices=world, use_distributed_sampler=False
    )
    return [each[1] for each in module.means]


def test_forgetting_on_ranks_of_unlike_cuts() -> None:
    for means in raise_rank_errors(run_ranks(on_ranks, 2)):
        assert means == pytest.approx(wanted(3), abs=1e-12)
