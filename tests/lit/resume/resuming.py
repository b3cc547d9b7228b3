"""Saving inside a window, and resuming from there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from tests.helpers import ragged_sequences, trainer, weights
from tests.lit.fronts import RAGGED, WINDOW, Mixed, Plain, batches_of, big_batch
from tests.zoo.callbacks import Saving as Saving  # for those who resume by these ways
from trainkit import AccumulationCallback, PerToken

SEQUENCES = ragged_sequences(38)
START = weights(Plain())
EXACT = big_batch(SEQUENCES, optimizer="adamw").end
"""After two epochs without an interruption, with AdamW in float64."""


class Resumable:
    """A loader that Lightning can resume: it saves how many batches it has given.

    Args:
        replay: how many of them to give again, after an exception in the last one.
    """

    def __init__(self, replay: int = 0) -> None:
        self.batches = list(batches_of(SEQUENCES, RAGGED))
        self.given = 0
        self.replay = replay

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        self.given %= len(self.batches)
        while self.given < len(self.batches):
            self.given += 1
            yield self.batches[self.given - 1]

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"] - self.replay


def saved(
    path: Path,
    at: int,
    hook: str = "on_train_batch_end",
    *,
    window: int = WINDOW,
    module: Any = None,
) -> Plain:
    """Trains to its end, and leaves a checkpoint of this moment."""
    module = module or Mixed(optimizer="adamw")
    trainer(window, callbacks=[Saving(path, at, hook)]).fit(module, Resumable())
    return module


def strip(path: Path, key: str = "trainkit") -> Path:
    """Leave what a checkpoint of plain Lightning holds of an open window: nothing."""
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint[key]
    torch.save(checkpoint, path)
    return path


def make(front: str) -> tuple[Plain, list[pl.Callback]]:
    if front == "mixin":
        return Mixed(optimizer="adamw"), []
    return Plain(optimizer="adamw"), [AccumulationCallback(PerToken())]


def resumed(path: Path, front: str = "mixin", *, replay: int = 0, **how: Any) -> Plain:
    """A new process's view: everything is made anew, then resumed."""
    module, ours = make(front)
    trainer(WINDOW, callbacks=ours, **how).fit(
        module, Resumable(replay), ckpt_path=path, weights_only=True
    )
    return module


def holds(path: Path) -> dict[str, Any]:
    """Loads as `weights_only`, so that nobody must trust the file."""
    return torch.load(path, weights_only=True)["trainkit"]
