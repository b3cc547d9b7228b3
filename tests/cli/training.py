"""`trainkit train` in this process, small; models for it, and what disturbs them."""

from __future__ import annotations

import functools
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hydra.core.global_hydra import GlobalHydra
from lightning.pytorch import Callback, LightningModule
from trainkit.recipes.code_lm import code_lm  # type: ignore[import-not-found]

from recipes.code_lm import CodeLM
from trainkit.cli.main import main

# They are the source of all of Python's library.
code_lm.read_functions = functools.cache(code_lm.read_functions)

SMALL = """
trainer.max_steps=2 trainer.val_check_interval=4 trainer.num_sanity_val_steps=0
trainer.log_every_n_steps=1 callbacks.checkpoint.every_n_train_steps=1 experiment=demo
data.max_length=128 data.num_train=64 data.num_val=8 data.batch_size=2 model.d_model=8
model.num_layers=1 model.num_heads=1 report=false
""".split()


def train(*overrides: str, small: Sequence[str] = SMALL) -> int:
    GlobalHydra.instance().clear()
    flags = [word for word in overrides if word.startswith("-")]
    rest = [word for word in overrides if not word.startswith("-")]
    return main(["train", *flags, *small, *rest])


def run_dirs(where: Path) -> list[Path]:
    return sorted(path.parent for path in where.rglob("overrides.yaml"))


def the_run(where: Path) -> Path:
    (found,) = run_dirs(where)
    return found


def summary_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


def weights_of(run: Path, name: str = "last.ckpt") -> dict[str, torch.Tensor]:
    checkpoint = torch.load(run / "checkpoints" / name, weights_only=False)
    return checkpoint["state_dict"]


def same_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name], other[name]) for name in one
    )


# ---- models, also in processes of their own, and what disturbs them ------------------


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


class Breaks(CodeLM):
    """Has a fault of its own when so many steps have been taken."""

    at = 1

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == self.at:
            raise RuntimeError("my own fault")


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
