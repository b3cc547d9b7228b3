"""Callbacks and loggers that keep what a training shows, and what it says."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor

from tests.helpers import gradients, weights


class Gradients(pl.Callback):
    """Keeps the gradient of each step, as any callback sees it."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_before_optimizer_step(
        self, trainer: Any, pl_module: Any, optimizer: Any
    ) -> None:
        self.seen.append(gradients(pl_module).clone())


class Weights(pl.Callback):
    """Keeps the weights after each batch, and counts the steps that moved them.

    Attributes:
        seen: the weights, the first of them before training.
        scales: the gradient scaler's factor after each batch, where there is one.
    """

    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        self.scales: list[float] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append(weights(pl_module))

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.seen.append(weights(pl_module))
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            self.scales.append(scaler.get_scale())

    @property
    def num_taken(self) -> int:
        """How many batches ended with other weights than they began with."""
        pairs = zip(self.seen, self.seen[1:], strict=False)
        return sum(not torch.equal(before, after) for before, after in pairs)


class Ending(pl.Callback):
    """Ends a `fit` after one batch, once: asks it to stop, or raises an error."""

    def __init__(self, at: int, error: BaseException | None = None) -> None:
        self.at, self.error, self.is_done = at, error, False

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.is_done or batch_idx != self.at:
            return
        self.is_done = True
        if self.error is not None:
            raise self.error
        trainer.should_stop = True


class Saving(pl.Callback):
    """Saves once, in a hook of one's choice, at a batch counted over all epochs."""

    def __init__(self, path: Path, at: int, hook: str = "on_train_batch_end") -> None:
        self.path, self.at, self.has_saved = path, at, False
        setattr(self, hook, self.save)

    def save(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        batches = trainer.fit_loop.epoch_loop.total_batch_idx
        if batches == self.at and not self.has_saved:
            self.has_saved = True
            trainer.save_checkpoint(self.path)


class Table(Logger):
    """A logger that keeps all rows, and all hyperparameters, that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []
        self.parameters: list[Any] = []

    @property
    def name(self) -> str:
        return "table"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.parameters.append(params)

    def log_metrics(
        self, metrics: Mapping[str, float], step: int | None = None
    ) -> None:
        self.rows.append({**metrics, "step": -1 if step is None else step})

    def column(self, name: str) -> list[float]:
        """The values of one name, in order."""
        return [row[name] for row in self.rows if name in row]


@contextmanager
def told(start: str = "") -> Iterator[list[str]]:
    """Collects the warnings whose text begins so."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    texts = (str(each.message) for each in caught)
    found += [text for text in texts if text.startswith(start)]


SENT: dict[str, Callable[[Any], Any]] = {
    "pickled": lambda each: pickle.loads(pickle.dumps(each)),
    "copied": copy.deepcopy,
}
"""Ways in which an object goes to another process, or stays beside itself."""


class Terminal(io.StringIO):
    """Keeps what is shown, as a terminal does."""

    def isatty(self) -> bool:
        return True
