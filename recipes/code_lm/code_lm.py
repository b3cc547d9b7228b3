"""A language model on the Python standard library's own functions.

    trainkit train                       # on bytes, in windows of streamed batches
    trainkit train experiment=code_lm    # on byte-level BPE, in split windows

Each function is a sequence of ten to thousands of bytes or tokens. On such ragged data
a mean of micro-batch means is not the mean over the window's tokens.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn

from trainkit import AccumulationMixin, PadCollate, ResumableLoader

Batch = dict[str, Tensor]

NUM_BYTES = 256

# ---- data ----------------------------------------------------------------------------


FUNCTION = re.compile(rb"^( *)(?:async )?def .*\n(?:(?:\1[ )].*)?\n)*", re.MULTILINE)
"""A line with `def`, and the lines below it: deeper ones, a lone `)`, blank ones."""


def read_functions() -> list[bytes]:
    """The source of every function in the top-level modules of this interpreter.

    They are found by indentation: in a hundredth of the time of parsing, with a
    different result for at most one function in a hundred.
    """
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return [
        found.group().rstrip() + b"\n"
        for path in sources
        for found in FUNCTION.finditer(path.read_bytes())
    ]


# The mask has the rows' lengths, by which split windows cut them.
PAD = PadCollate({"labels": -100}, mask="attention_mask")


def collate(functions: Sequence[Tensor]) -> Batch:
    """Pad to the longest; the label of each token is the next one."""
    return PAD([{"ids": each[:-1], "labels": each[1:]} for each in functions])


class Functions(LightningDataModule):
    """Functions as ids, split into training and validation.

    Args:
        batch_size: functions in a batch of the loader.
        vocab_size: how many tokens of byte-level BPE are learned from the functions to
            train on; None leaves them as bytes.
        max_length: how many bytes or tokens of a function are kept.
        num_train: functions to train on, at most.
        num_val: functions to validate on.
        seed: of the split and of the order of each epoch.
        num_workers: processes that load.
    """

    def __init__(
        self,
        *,
        batch_size: int = 4,
        vocab_size: int | None = None,
        max_length: int = 384,
        num_train: int = 6000,
        num_val: int = 200,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.vocab_size = vocab_size
        self.max_length = max_length
        self.num_train = num_train
        self.num_val = num_val
        self.seed = seed
        self.num_workers = num_workers

    def setup(self, stage: str) -> None:
        functions = read_functions()
        order = torch.Generator().manual_seed(self.seed)
        shuffled = torch.randperm(len(functions), generator=order).tolist()
        chosen = [functions[n] for n in shuffled[: self.num_val + self.num_train]]
        rows = [torch.tensor(row[: self.max_length]) for row in self.encode(chosen)]
        self.val_rows, self.train_rows = rows[: self.num_val], rows[self.num_val :]

    def encode(self, functions: Sequence[bytes]) -> list[list[int]]:
        """The ids of each function; merges are learned from those to train on."""
        if self.vocab_size is None:
            return [list(function) for function in functions]
        # Imported here, since the default run does not need the extra `recipes`.
        from trainkit.recipes import tokenizer  # type: ignore[import-not-found]

        texts = [function.decode(errors="replace") for function in functions]
        bpe = tokenizer.byte_bpe(texts[self.num_val :], vocab_size=self.vocab_size)
        return tokenizer.encode(bpe, texts)

    def train_dataloader(self) -> ResumableLoader:
        return ResumableLoader(
            self.train_rows,
            batch_size=self.batch_size,
            shuffle=True,
            seed=self.seed,
            collate_fn=collate,
            num_workers=self.num_workers,
        )

    def val_dataloader(self) -> ResumableLoader:
        return ResumableLoader(self.val_rows, batch_size=32, collate_fn=collate)


# ---- model ---------------------------------------------------------------------------


class CodeLM(AccumulationMixin, LightningModule):
    """A small decoder. The configuration chooses its strategy, cut and optimizer.

    Args:
        vocab_size: how many tokens there are; None: one for each byte.
        d_model: width.
        num_layers: depth.
        num_heads: of attention.
        max_length: the longest sequence it can read.
        dropout: in every layer.
    """

    def __init__(
        self,
        *,
        vocab_size: int | None = None,
        d_model: int = 64,
        num_layers: int = 2,
        num_heads: int = 2,
        max_length: int = 384,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.vocab_size = NUM_BYTES if vocab_size is None else vocab_size
        self.token = nn.Embedding(self.vocab_size, d_model)
        self.position = nn.Embedding(max_length, d_model)
        layer = nn.TransformerEncoderLayer(
            d_model,
            num_heads,
            dim_feedforward=4 * d_model,
            dropout=dropout,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.layers = nn.TransformerEncoder(
            layer, num_layers, nn.LayerNorm(d_model), enable_nested_tensor=False
        )
        self.head = nn.Linear(d_model, self.vocab_size)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, ids.device)
        place = torch.arange(length, device=ids.device)
        hidden = self.token(ids) + self.position(place)
        # Padding is on the right, so the causal mask alone hides it.
        return self.head(self.layers(hidden, mask=mask, is_causal=True))

    def loss(self, batch: Batch) -> Tensor:
        logits = self(batch["ids"]).flatten(0, 1)
        return F.cross_entropy(logits, batch["labels"].flatten())

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        num_labels = (batch["labels"] != -100).sum()  # whatever the strategy weighs
        loss = self.loss(batch)
        self.log_exact("val/loss", loss, weight=num_labels, prog_bar=True)


if __name__ == "__main__":
    from trainkit.cli.script import train_file

    train_file(__file__, "experiment=code_lm", model="CodeLM", data="Functions")
