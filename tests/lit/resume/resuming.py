"""Saving inside a window, and resuming from there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from tests.helpers import deviation, ragged_sequences, trainer, weights
from tests.lit.fronts import RAGGED, WINDOW, batches_of, big_batch
from tests.zoo.callbacks import Saving as Saving  # for those who resume by these ways
from tests.zoo.modules import Plain, on_front
from trainkit import MicroBatching

SEQUENCES = ragged_sequences(38)
START = weights(Plain())
ENDS = {
    window: big_batch(SEQUENCES, window=window, optimizer="adamw").end
    for window in (1, 2, WINDOW)
}
"""After two epochs without an interruption, with AdamW in float64, by window."""


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


def train(
    *callbacks: pl.Callback,
    path: Path | None = None,
    front: str = "mixin",
    kind: Any = Plain,
    cut: MicroBatching | None = None,
    window: int = WINDOW,
    replay: int = 0,
    validation: Any = None,
    **options: Any,
) -> pl.Trainer:
    """Train with AdamW, or resume from a path as a new process does: everything is made
    anew."""
    module, ours = on_front(front, kind, cut=cut, optimizer="adamw")
    fitted = trainer(window, callbacks=[*callbacks, *ours], **options)
    is_safe = True if path else None
    data = Resumable(replay)
    fitted.fit(module, data, validation, ckpt_path=path, weights_only=is_safe)
    return fitted


def off(window: int = WINDOW, **how: Any) -> float:
    """How far a run ends from where it would without an interruption."""
    return deviation(train(window=window, **how).lightning_module, ENDS[window], START)


def strip(path: Path, key: str = "trainkit") -> Path:
    """Leave what a checkpoint of plain Lightning holds of an open window: nothing."""
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint[key]
    torch.save(checkpoint, path)
    return path


def holds(path: Path) -> dict[str, Any]:
    """Loads as `weights_only`, so that nobody must trust the file."""
    return torch.load(path, weights_only=True)["trainkit"]
