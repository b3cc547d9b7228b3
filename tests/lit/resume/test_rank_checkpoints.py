"""A checkpoint taken inside a window on several ranks, resumed on as many or on one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from tests.helpers import (
    NAIVE,
    TOLERANCE,
    TokenModule,
    deviation,
    pad,
    ragged_sequences,
    raise_rank_errors,
    run_ranks,
    train_on_windows,
    trainer,
    weights,
    windows_over_ranks,
)
from tests.lit.front.test_manual import ManualModule
from trainkit import AccumulationCallback, PerToken

EXACT = TOLERANCE[torch.float64]
DATA = ragged_sequences(32)
WINDOW, NUM_BATCHES = 4, 8
INSIDE = 6  # one window is over, and two micro-batches of the next have run


class FromBatch:
    """A rank's share of an epoch of eight batches, without those already seen."""

    def __init__(self, rank: int, world: int, skip: int) -> None:
        share, size = DATA[rank::world], len(DATA) // world // NUM_BATCHES
        if world == 1:  # the windows of two ranks: their shares interleave
            size = len(DATA) // NUM_BATCHES
        self.batches = [share[i : i + size] for i in range(0, len(share), size)]
        self.skip = skip

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return map(pad, self.batches[self.skip :])


class Save(pl.Callback):
    """Every rank saves before or after a batch."""

    def __init__(self, path: str, *, before: int = -1, after: int = -1) -> None:
        self.path, self.before, self.after = path, before, after

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self.before:
            trainer.save_checkpoint(self.path)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx + 1 == self.after:
            trainer.save_checkpoint(self.path)


def train(
    rank: int,
    world: int,
    resume: str | None,
    save: dict[str, Any] | None,
    skip: int = 0,
) -> Tensor:
    module = TokenModule(dtype=torch.float64, optimizer="adamw")
    fit = trainer(
        WINDOW,
        strategy="ddp" if world > 1 else "auto",
        devices=world,
        max_epochs=1,
        use_distributed_sampler=False,
        callbacks=[AccumulationCallback(PerToken()), *([Save(**save)] if save else [])],
    )
    fit.fit(module, FromBatch(rank, world, skip), ckpt_path=resume)
    return weights(module)


def off_big_batch(ends: list[Any]) -> float:
    start = TokenModule(dtype=torch.float64)
    reference = TokenModule(dtype=torch.float64, optimizer="adamw")
    train_on_windows(reference, windows_over_ranks(DATA, 2, WINDOW, 2), epochs=1)
    return max(deviation(e, reference, start) for e in raise_rank_errors(ends))


def strip(path: Path) -> None:
    """What a checkpoint of plain Lightning holds of an open window: nothing."""
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["trainkit"]
    torch.save(checkpoint, path)


@pytest.mark.parametrize("world", [1, 2])
def test_resume_inside_a_window_of_two_ranks_equals_the_big_batch(
    tmp_path: Path, world: int
) -> None:
    """transformers#22143: the pending gradients were gone."""
    path = str(tmp_path / "inside.ckpt")
    saved = run_ranks(train, 2, None, {"path": path, "after": INSIDE})
    assert off_big_batch(saved) <= EXACT
    resumed = run_ranks(train, world, path, None, INSIDE)
    assert off_big_batch(resumed) <= EXACT


def test_resume_without_the_window_does_not_equal_the_big_batch(tmp_path: Path) -> None:
    path = tmp_path / "inside.ckpt"
    run_ranks(train, 2, None, {"path": str(path), "after": INSIDE})
    strip(path)
    assert off_big_batch(run_ranks(train, 2, str(path), None, INSIDE)) > NAIVE


@pytest.mark.parametrize("moment", [{"before": INSIDE}, {"after": INSIDE + 1}])
def test_resume_from_a_resumed_window_equals_the_big_batch(
    tmp_path: Path, moment: dict[str, int]
) -> None:
    """Saved a second time inside the same window, at once or one micro-batch later."""
    first, second = str(tmp_path / "first.ckpt"), str(tmp_path / "second.ckpt")
    run_ranks(train, 2, None, {"path": first, "after": INSIDE})
    again = run_ranks(train, 2, first, {"path": second, **moment}, INSIDE)
    assert off_big_batch(again) <= EXACT
    skip = INSIDE if "before" in moment else INSIDE + 1
    assert off_big_batch(run_ranks(train, 2, second, None, skip)) <= EXACT


def train_manual(
    rank: int, world: int, resume: str | None, save: Any, skip: int, apart: bool
) -> Tensor:
    module = ManualModule(dtype=torch.float64, optimizer="adamw")
    module.apart = apart
    fit = trainer(
        WINDOW,
        strategy="ddp" if world > 1 else "auto",
        devices=world,
        max_epochs=1,
        use_distributed_sampler=False,
        callbacks=[Save(**save)] if save else [],
    )
    fit.fit(module, FromBatch(rank, world, skip), ckpt_path=resume)
    return weights(module)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_resume_inside_a_manual_window_equals_the_big_batch(
    tmp_path: Path, world: int, apart: bool
) -> None:
    """Whether the ranks' gradients were together already or not."""
    path = str(tmp_path / "inside.ckpt")
    save = {"path": path, "after": INSIDE}
    assert off_big_batch(run_ranks(train_manual, 2, None, save, 0, apart)) <= EXACT
    resumed = run_ranks(train_manual, world, path, None, INSIDE, apart)
    assert off_big_batch(resumed) <= EXACT
