"""Hugging Face's Trainer with a contrastive loss, in the memory of a chunk.

    python recipes/loops/hf_trainer.py

Its `gradient_accumulation_steps` cannot make this loss: each row is compared with all
rows of the batch. `Chunked` runs the encoder in chunks of rows, in a subclass whose
`compute_loss` sees the whole batch; nothing else of the Trainer changes.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from transformers import BertConfig, BertModel, Trainer, TrainingArguments

from trainkit import Chunked

BATCH = 32
"""The rows of an optimizer step, of which each has all the others as its negatives."""


class TwoViews(nn.Module):
    """An encoder of token ids, whose first position is a row's vector."""

    def __init__(self) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=50,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.encoder = BertModel(config)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.encoder(input_ids=ids).last_hidden_state
        return normalize(hidden[:, 0], dim=-1)


class ContrastiveTrainer(Trainer):
    """A Trainer whose loss compares each row with the whole batch.

    Args:
        size: the most rows of which the encoder keeps what the backward pass needs.
    """

    def __init__(self, model: TwoViews, *args: Any, size: int, **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        Chunked(model.encoder, size=size)

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Tensor:
        one, other = model(inputs["ids"]), model(inputs["others"])
        alike = one @ other.T / 0.1
        return cross_entropy(alike, torch.arange(len(one), device=alike.device))


def read_rows(number: int = 128) -> list[dict[str, Tensor]]:
    """Pairs of sequences, of which the second is the first with some tokens changed."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 50, (number, 12), generator=draw)
    others = torch.where(
        torch.rand(ids.shape, generator=draw) < 0.2,
        torch.randint(0, 50, ids.shape, generator=draw),
        ids,
    )
    return [{"ids": a, "others": b} for a, b in zip(ids, others, strict=True)]


def train(size: int, *, batch: int = BATCH, accumulate: int = 1) -> nn.Module:
    """Train for two epochs, with chunks of `size` rows within batches of `batch`."""
    torch.manual_seed(0)
    model = TwoViews().double()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulate,
            num_train_epochs=2,
            learning_rate=1e-3,
            optim="sgd",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            use_cpu=not torch.cuda.is_available(),
        )
        rows: Any = read_rows()
        ContrastiveTrainer(model, arguments, train_dataset=rows, size=size).train()
    return model


def apart(one: nn.Module, other: nn.Module) -> float:
    """The distance of the weights, as a share of the distance travelled."""
    torch.manual_seed(0)
    ours, theirs, first = (
        nn.utils.parameters_to_vector(each.parameters()).detach()
        for each in (one, other, TwoViews().double())
    )
    return float((ours - theirs).norm() / (theirs - first).norm())


if __name__ == "__main__":
    whole = train(size=BATCH)
    chunks = apart(train(size=8), whole)
    print(f"chunks of 8 rows: {chunks:.0e} from the big batch")
    usual = apart(train(size=BATCH, batch=8, accumulate=4), whole)
    print(f"gradient_accumulation_steps=4: {usual:.0%} from the big batch")
