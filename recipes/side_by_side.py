"""Plain Lightning, trainkit and the big batch, side by side.

    python recipes/side_by_side.py

One small language model is trained five times, from equal weights on equal data: the
lines of a Python module. Each line is a sequence, so lengths differ widely. The first
training has batches of 32 lines. The others have batches of 4 lines with
`accumulate_grad_batches=8`, or of 1 line with `accumulate_grad_batches=32`, each with
and without trainkit's callback.

All should end with equal weights. The table shows how far they are apart, as a share of
the distance that training moved them.
"""

from __future__ import annotations

import argparse
import inspect
import logging
import warnings
from collections.abc import Sequence

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trainkit import AccumulationCallback, PerToken

BIG_BATCH = 32
NUM_LINES = 424  # the last window of an epoch is short: 8 lines instead of 32

# ---- data ----------------------------------------------------------------------------


def read_lines() -> list[Tensor]:
    """Lines of Python source as byte ids, from 2 to some 80 characters long."""
    source = inspect.getsource(argparse).splitlines()
    lines = [line.strip().encode() for line in source if len(line.strip()) > 1]
    return [torch.tensor(list(line[:80])) for line in lines[:NUM_LINES]]


def collate(lines: Sequence[Tensor]) -> dict[str, Tensor]:
    """Pad to the longest line; the label of each character is the next one."""
    ids = nn.utils.rnn.pad_sequence(list(lines), batch_first=True)
    labels = nn.utils.rnn.pad_sequence(
        [line[1:] for line in lines], batch_first=True, padding_value=-100
    )
    return {"ids": ids[:, :-1], "labels": labels}


# ---- model: knows nothing of trainkit ------------------------------------------------


class CharModel(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(256, 48)
        self.rnn = nn.GRU(48, 64, batch_first=True)
        self.head = nn.Linear(64, 256)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        hidden, _ = self.rnn(self.embed(batch["ids"]))
        return F.cross_entropy(
            self.head(hidden).flatten(0, 1), batch["labels"].flatten()
        )

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


# ---- training ------------------------------------------------------------------------


def train(
    lines: list[Tensor],
    batch_size: int,
    accumulate: int,
    callbacks: Sequence[pl.Callback],
) -> CharModel:
    model = CharModel()
    trainer = pl.Trainer(
        max_epochs=2,
        accumulate_grad_batches=accumulate,
        callbacks=list(callbacks),
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(lines, batch_size, collate_fn=collate))  # type: ignore[arg-type]
    return model


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # Lightning's advice on workers and the like
    console = Console()
    lines = read_lines()
    lengths = sorted(len(line) for line in lines)
    console.print(
        f"{len(lines)} lines of Python, {lengths[0]} to {lengths[-1]} characters; "
        f"2 epochs; an optimizer step for every {BIG_BATCH} lines"
    )

    start = weights(CharModel())
    with console.status("training five times"):
        big = train(lines, BIG_BATCH, 1, [])
        runs = {f"big batch, 1 x {BIG_BATCH}": big}
        for size in (4, 1):
            cut = f"{BIG_BATCH // size} x {size}"
            for name, callbacks in (
                (f"plain Lightning, {cut}", []),
                (f"trainkit, {cut}", [AccumulationCallback(PerToken())]),
            ):
                runs[name] = train(lines, size, BIG_BATCH // size, callbacks)

    table = Table(title="the same training, cut into micro-batches")
    table.add_column("how")
    table.add_column("loss after", justify="right")
    table.add_column("weights off by", justify="right")
    whole = collate(lines)
    distance = (weights(big) - start).norm()
    for name, model in runs.items():
        off = float((weights(model) - weights(big)).norm() / distance)
        shown = "" if model is big else f"{off:.1%}" if off > 1e-3 else f"{off:.0e}"
        table.add_row(name, f"{model.loss(whole).item():.4f}", shown)
    console.print(table)
    console.print("off by: distance from the big batch / distance trained")


if __name__ == "__main__":
    main()
