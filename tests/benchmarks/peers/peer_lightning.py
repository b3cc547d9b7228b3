"""Plain Lightning: `accumulate_grad_batches`."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from tests.benchmarks.peers.work import CausalNet, Work, loss_of, pad

PACKAGES = ("lightning",)


class Module(pl.LightningModule):
    def __init__(self, work: Work, net: CausalNet) -> None:
        super().__init__()
        self.work = work
        self.net = net

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return loss_of(self.net(batch["input_ids"]), batch["labels"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.work.make_optimizer(self.parameters())


def trainer(work: Work, accumulate: int) -> pl.Trainer:
    """A quiet Trainer on the CPU, on the ranks that torchrun started."""
    return pl.Trainer(
        accelerator="cpu",
        devices=work.world_size,
        strategy="ddp" if work.world_size > 1 else "auto",
        use_distributed_sampler=False,
        accumulate_grad_batches=accumulate,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def train(work: Work, net: CausalNet) -> None:
    rows: Any = work.rows
    fitted = trainer(work, work.accumulate)
    # As Lightning would make it, but in order.
    ranks = fitted.world_size, fitted.global_rank
    sampler = DistributedSampler(rows, *ranks, shuffle=False)
    loader = DataLoader(rows, work.micro_batch, sampler=sampler, collate_fn=pad)
    fitted.fit(Module(work, net), loader)


VARIANTS = {"Lightning": train}
