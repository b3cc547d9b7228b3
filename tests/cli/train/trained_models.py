"""Models for trainings, also in processes of their own, and what disturbs them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule

from recipes.code_lm import CodeLM


class Foreign(LightningModule):
    """Knows nothing of trainkit, takes what is said of the other model, and needs none
    of it."""

    def __init__(self, width: int = 4, **kwargs: int) -> None:
        super().__init__()
        self.byte = torch.nn.Embedding(256, width)
        self.head = torch.nn.Linear(width, 256)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self.head(self.byte(batch["ids"])).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, batch["labels"].flatten())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.training_step(batch, batch_idx))


class Optimized(Foreign):
    """Has an optimizer of its own."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


OPTIMIZED = f"{__name__}.Optimized"


def own_option(conf: Path, group: str, target: str) -> None:
    """An option `mine` of a group, in a folder of configurations."""
    (conf / group).mkdir(parents=True, exist_ok=True)
    (conf / group / "mine.yaml").write_text(f"_target_: {target}")


class Signalled(CodeLM):
    """Sends `TEST_SIGNAL` to the ranks named in `TEST_RANKS`, once, inside a window."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        ranks = os.environ.get("TEST_RANKS", "").split(",")
        if batch_idx == 3 and str(self.global_rank) in ranks:
            os.kill(os.getpid(), signal.Signals[os.environ["TEST_SIGNAL"]])


class SecondRankFails(CodeLM):
    """Its second rank fails when a step has been taken."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 1 and self.trainer.global_step == 1:
            raise RuntimeError("the second rank is broken")


class KilledOnce(CodeLM):
    """Its second rank is killed in the second window, if none has been before."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        was = Path("killed")
        if self.global_rank == 1 and batch_idx == 3 and not was.exists():
            was.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Killer(Callback):
    """Sends this process a signal, once.

    Args:
        hook: the name of a Callback's hook.
        batch: when so many micro-batches have been trained on, or later.
        signum: what to send.
    """

    def __init__(self, *, hook: str, batch: int, signum: str) -> None:
        self.batch = batch
        self.signum = signal.Signals[signum]
        self.has_sent = False
        setattr(self, hook, self._send)

    def _send(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if not self.has_sent and trainer.fit_loop.total_batch_idx >= self.batch:
            self.has_sent = True
            os.kill(os.getpid(), self.signum)


def killer(hook: str, batch: int, signum: str = "SIGTERM") -> str:
    """The word that adds it to a training."""
    return (
        f"+callbacks.killer={{_target_: {__name__}.Killer, "
        f"hook: {hook}, batch: {batch}, signum: {signum}}}"
    )
