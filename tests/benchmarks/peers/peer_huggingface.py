"""Hugging Face's Trainer: `gradient_accumulation_steps`."""

from __future__ import annotations

import tempfile
from typing import Any

from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from tests.benchmarks.peers.transformers_model import (
    NetForCausalLM,
    arguments,
    optimizers,
)
from tests.benchmarks.peers.work import CausalNet, Work, loss_of, pad

PACKAGES = ("transformers", "accelerate")


class OwnLoss(nn.Module):
    """A module that returns its mean loss and knows of no `num_items_in_batch`."""

    def __init__(self, net: CausalNet) -> None:
        super().__init__()
        self.net = net

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": loss_of(self.net(input_ids), labels)}


def train(work: Work, net: CausalNet) -> None:
    fit(work, NetForCausalLM(net))


def train_own_loss(work: Work, net: CausalNet) -> None:
    fit(work, OwnLoss(net))


def fit(work: Work, model: Any) -> None:
    rows: Any = [{"input_ids": row} for row in work.rows]
    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            model=model,
            args=TrainingArguments(
                **arguments(work, folder), remove_unused_columns=False
            ),
            data_collator=lambda rows: pad([row["input_ids"] for row in rows]),
            train_dataset=rows,
            optimizers=optimizers(work, model),
        ).train()


VARIANTS = {
    "Hugging Face Trainer": train,
    "Hugging Face Trainer, own mean loss": train_own_loss,
}
