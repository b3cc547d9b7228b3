"""A checkpoint taken inside a window on several ranks, resumed on as many or on one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from shutil import copy
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
from tests.lit.resume.resuming import strip
from tests.zoo import Manual
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
    apart: bool | None = None,
) -> Tensor:
    """The weights at the end; of manual optimization if `apart` says how."""
    module: Any = TokenModule(dtype=torch.float64, optimizer="adamw")
    callbacks: list[Any] = [AccumulationCallback(PerToken())]
    if apart is not None:
        module, callbacks = Manual(optimizer="adamw"), []
        module.apart = apart
    fit = trainer(
        WINDOW,
        strategy="ddp" if world > 1 else "auto",
        devices=world,
        max_epochs=1,
        use_distributed_sampler=False,
        callbacks=[*callbacks, *([Save(**save)] if save else [])],
    )
    fit.fit(module, FromBatch(rank, world, skip), ckpt_path=resume)
    return weights(module)


AGAIN: dict[str, dict[str, int]] = {
    "at once": {"before": INSIDE},
    "later": {"after": INSIDE + 1},
}


def on_two_ranks(rank: int, world: int, folder: str) -> dict[str, Tensor]:
    """Every training of this file that needs both ranks."""
    path = Path(folder)
    inside = str(path / "inside.ckpt")
    ends = {
        "saved": train(rank, world, None, {"path": inside, "after": INSIDE}),
        "resumed": train(rank, world, inside, None, INSIDE),
    }
    if rank == 0:
        strip(Path(copy(inside, path / "stripped.ckpt")))
    torch.distributed.barrier()
    ends["stripped"] = train(rank, world, str(path / "stripped.ckpt"), None, INSIDE)
    for name, moment in AGAIN.items():
        second = str(path / f"{name}.ckpt")
        save = {"path": second, **moment}
        skip = INSIDE if "before" in moment else INSIDE + 1
        ends[f"saved {name}"] = train(rank, world, inside, save, INSIDE)
        ends[f"resumed {name}"] = train(rank, world, second, None, skip)
    for apart in (False, True):
        manual = str(path / f"manual {apart}.ckpt")
        save = {"path": manual, "after": INSIDE}
        ends[f"saved {apart}"] = train(rank, world, None, save, 0, apart)
        ends[f"resumed {apart}"] = train(rank, world, manual, None, INSIDE, apart)
    return ends


def on_one(rank: int, world: int, folder: str) -> dict[str, Tensor]:
    """Resumed from the checkpoints of two ranks."""
    path = Path(folder)
    ends = {"resumed": train(rank, world, str(path / "inside.ckpt"), None, INSIDE)}
    for apart in (False, True):
        manual = str(path / f"manual {apart}.ckpt")
        ends[f"resumed {apart}"] = train(rank, world, manual, None, INSIDE, apart)
    return ends


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    """What each rank ended with, by the number of ranks that resumed."""
    folder = str(tmp_path_factory.mktemp("ranks"))
    two = raise_rank_errors(run_ranks(on_two_ranks, 2, folder))
    return {1: raise_rank_errors(run_ranks(on_one, 1, folder)), 2: two}


def off_big_batch(ends: list[Any], name: str) -> float:
    return off_long_windows([each[name] for each in ends])


def off_long_windows(found: list[Tensor]) -> float:
    """How far the worst of these weights is from those of the big batch."""
    start = TokenModule(dtype=torch.float64)
    reference = TokenModule(dtype=torch.float64, optimizer="adamw")
    train_on_windows(reference, windows_over_ranks(DATA, 2, WINDOW, 2), epochs=1)
    return max(deviation(each, reference, start) for each in found)


@pytest.mark.parametrize("world", [1, 2])
def test_resume_inside_a_window_of_two_ranks_equals_the_big_batch(
    ends: Any, world: int
) -> None:
    """transformers#22143: the pending gradients were gone."""
    assert len(ends[world]) == world
    assert off_big_batch(ends[2], "saved") <= EXACT
    assert off_big_batch(ends[world], "resumed") <= EXACT


def test_resume_without_the_window_does_not_equal_the_big_batch(ends: Any) -> None:
    assert off_big_batch(ends[2], "stripped") > NAIVE


@pytest.mark.parametrize("moment", AGAIN)
def test_resume_from_a_resumed_window_equals_the_big_batch(
    ends: Any, moment: str
) -> None:
    """Saved a second time inside the same window, at once or one micro-batch later."""
    assert off_big_batch(ends[2], f"saved {moment}") <= EXACT
    assert off_big_batch(ends[2], f"resumed {moment}") <= EXACT


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_resume_inside_a_manual_window_equals_the_big_batch(
    ends: Any, world: int, apart: bool
) -> None:
    """Whether the ranks' gradients were together already or not."""
    assert off_big_batch(ends[2], f"saved {apart}") <= EXACT
    assert off_big_batch(ends[world], f"resumed {apart}") <= EXACT
