"""A checkpoint taken inside a window on several ranks, resumed on as many or on one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from shutil import copy
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from tests.helpers import NAIVE, TOLERANCE, pad, ragged_sequences, run_cases
from tests.lit.resume.resuming import strip
from tests.lit.windows.rank_cases import Apart, deviations, fit
from tests.zoo.modules import Manual, Plain, Sharded, whole

EXACT = TOLERANCE[torch.float64]
DATA = ragged_sequences(32)
WINDOW, NUM_BATCHES = 4, 8
INSIDE = 6  # one window is over, and two micro-batches of the next have run


class FromBatch:
    """A rank's share of an epoch of eight batches, without those already seen."""

    def __init__(self, rank: int, world: int, skip: int) -> None:
        # On one rank the windows are those of two: their shares interleave.
        share, size = DATA[rank::world], len(DATA) // max(world, 1) // NUM_BATCHES
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

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if args[-1] + 1 == self.after:
            trainer.save_checkpoint(self.path)


KINDS: dict[str, dict[str, Any]] = {
    "automatic": {"front": "callback", "kind": Plain},
    "manual": {"front": "plain", "kind": Manual},
    "manual, apart": {"front": "plain", "kind": Apart},
    "sharded": {"front": "callback", "kind": Sharded, "split": 1},
}
Case = tuple[str, dict[str, int] | None, int]
"""The training from which it resumes, when it saves, and the batches already seen."""
SAVED: dict[str, Case] = {f"{k}: saved": ("", {"after": INSIDE}, 0) for k in KINDS}
RESUMED: dict[str, Case] = {
    f"{kind}: resumed": (f"{kind}: saved", None, INSIDE) for kind in KINDS
}
AGAIN: dict[str, Case] = {
    # A second checkpoint inside the same window, of a run that resumed from the first.
    "saved at once": ("automatic: saved", {"before": INSIDE}, INSIDE),
    "resumed at once": ("saved at once", None, INSIDE),
    "saved later": ("automatic: saved", {"after": INSIDE + 1}, INSIDE),
    "resumed later": ("saved later", None, INSIDE + 1),
    "stripped": ("automatic: saved", None, INSIDE),
}


def train(rank: int, world: int, folder: Path, name: str, case: Case) -> Tensor:
    """The weights that a training of one epoch ended with."""
    resume, save, skip = case
    path = folder / f"{resume}.ckpt"
    if name == "stripped":
        path = folder / "stripped.ckpt"
        if rank == 0:
            strip(Path(copy(folder / f"{resume}.ckpt", path)))
        torch.distributed.barrier()
    how = KINDS.get(name.partition(": ")[0], KINDS["automatic"])
    fitted = fit(
        rank,
        world,
        how["front"],
        how["kind"],
        *([Save(str(folder / f"{name}.ckpt"), **save)] if save else []),
        data=FromBatch(rank, world, skip),
        made={"optimizer": "adamw"},
        window=WINDOW,
        max_epochs=1,
        split=how.get("split"),
        ckpt_path=str(path) if resume else None,
    )
    return whole(fitted.lightning_module)


def off(world: int, folder: Path, cases: dict[str, Case]) -> dict[str, float]:
    """How far the worst rank is from the big batch."""
    all_cases = {name: (train, folder, name, case) for name, case in cases.items()}
    of: dict[str, Any] = {"of": (2, WINDOW), "epochs": 1, "replicas": 2}
    return {
        name: max(deviations(ends, DATA, "adamw", **of))
        for name, ends in run_cases(world, all_cases).items()
    }


def test_resume_inside_a_window_of_two_ranks_equals_the_big_batch(
    tmp_path: Path,
) -> None:
    """transformers#22143: the pending gradients were gone. On two ranks or on one,
    saved once or twice in the window, by manual optimization and sharded too."""
    on_two = off(2, tmp_path, SAVED | RESUMED | AGAIN)
    on_one = off(1, tmp_path, RESUMED)
    assert on_two.pop("stripped") > NAIVE
    for found in (on_two, on_one):
        assert {name: far for name, far in found.items() if far > EXACT} == {}
