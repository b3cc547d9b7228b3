"""A causal model of transformers on documents that share a row, without padding.

    trainkit train experiment=packed_lm

A batch is one row: the functions of Python's standard library, one behind the other.
It is cut between them under a budget of tokens, so that nothing is computed for
padding, and the loss is that of the padded batch. Positions begin anew in each
function, and the model looks at them as long as it makes no cache. With
`model.use_cache=true`, as transformers has it, functions see each other, and the proof
says so.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor
from trainkit.recipes import code_lm, tokenizer  # type: ignore[import-not-found]
from transformers import LlamaConfig, LlamaForCausalLM

from trainkit import (
    AccumulationMixin,
    PackCollate,
    PadCollate,
    PerToken,
    ResumableLoader,
    TokenLoss,
    TrainkitError,
)

Batch = dict[str, Any]
Layout = Literal["flattened", "packed", "padded"]

IGNORED = -100
END = "<|end|>"  # of a document; its id, 0, is also what pads rows

# ---- data ----------------------------------------------------------------------------


class Padded:
    """The documents of a batch as rows of one width, with the same labels as packed."""

    def __init__(self) -> None:
        self.pad = PadCollate({"labels": IGNORED}, mask="attention_mask")

    def __call__(self, documents: list[list[int]]) -> Batch:
        return self.pad(
            [{"input_ids": ids, "labels": [IGNORED, *ids[1:]]} for ids in documents]
        )


class Texts(LightningDataModule):
    """The functions of the standard library, split into training and validation.

    Args:
        layout: "flattened": one row without padding; "packed": rows of `max_length`,
            which are filled; "padded": a row for each document.
        batch_size: documents in a batch of the loader.
        vocab_size: how many tokens of byte-level BPE are learned.
        max_length: how many tokens of a document are kept.
        num_train: documents to train on, at most.
        num_val: documents to validate on.
        seed: of the split and of the order of each epoch.
    """

    def __init__(
        self,
        *,
        layout: Layout = "flattened",
        batch_size: int = 32,
        vocab_size: int = 1024,
        max_length: int = 256,
        num_train: int = 2400,
        num_val: int = 100,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if layout not in get_args(Layout):
            raise TrainkitError(
                f"Texts layout: must be one of {', '.join(get_args(Layout))}, received "
                f"{layout!r}. Write data.layout=flattened."
            )
        self.batch_size = batch_size
        self.vocab_size = vocab_size
        self.max_length = max_length
        self.num_train = num_train
        self.num_val = num_val
        self.seed = seed
        self.collate: Any = {
            "flattened": PackCollate(),
            "packed": PackCollate(length=max_length),
            "padded": Padded(),
        }[layout]

    def setup(self, stage: str) -> None:
        texts = [each.decode(errors="replace") for each in code_lm.read_functions()]
        order = torch.Generator().manual_seed(self.seed)
        chosen = torch.randperm(len(texts), generator=order).tolist()
        texts = [texts[n] for n in chosen[: self.num_val + self.num_train]]
        bpe = tokenizer.byte_bpe(
            texts[self.num_val :], vocab_size=self.vocab_size, special=[END]
        )
        end = bpe.token_to_id(END)
        documents = [
            [*ids, end][: self.max_length] for ids in tokenizer.encode(bpe, texts)
        ]
        documents = [ids for ids in documents if len(ids) > 1]
        self.val_rows = documents[: self.num_val]
        self.train_rows = documents[self.num_val :]

    def train_dataloader(self) -> ResumableLoader:
        return ResumableLoader(
            self.train_rows,
            batch_size=self.batch_size,
            shuffle=True,
            seed=self.seed,
            collate_fn=self.collate,
        )

    def val_dataloader(self) -> ResumableLoader:
        return ResumableLoader(self.val_rows, batch_size=16, collate_fn=Padded())


# ---- model ---------------------------------------------------------------------------


class PackedLM(AccumulationMixin, LightningModule):
    """A causal model with random weights, whose logits never exist whole.

    Args:
        vocab_size: how many tokens there are.
        hidden_size: width.
        num_layers: depth.
        num_heads: of attention.
        max_length: the longest document that it can read.
        use_cache: what a configuration of transformers says by default. With it, the
            model does not look at positions, and documents see each other.
    """

    # The model shifts labels inside, so the first label of a row is no target.
    accumulation = PerToken(shift=True)

    def __init__(
        self,
        *,
        vocab_size: int = 1024,
        hidden_size: int = 96,
        num_layers: int = 3,
        num_heads: int = 3,
        max_length: int = 256,
        use_cache: bool = False,
    ) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=3 * hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_heads,
            max_position_embeddings=max_length,
            tie_word_embeddings=True,
            use_cache=use_cache,
            bos_token_id=None,
            eos_token_id=0,
        )
        self.model = LlamaForCausalLM(config)
        self.token_loss = TokenLoss(self.model.lm_head, size=256)

    def loss_of(self, batch: Batch) -> Tensor:
        """The mean over the labels that count."""
        inputs = {name: batch[name] for name in batch if name != "labels"}
        states = self.model.model(**inputs).last_hidden_state
        return self.token_loss(states, batch["labels"], shift=True)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.loss_of(batch)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        num_labels = (batch["labels"][:, 1:] != IGNORED).sum()
        loss = self.loss_of(batch)
        self.log_exact("val/loss", loss, weight=num_labels, prog_bar=True)


if __name__ == "__main__":
    from trainkit.cli.script import train_file

    train_file(__file__, "experiment=packed_lm", model="PackedLM", data="Texts")
