"""An encoder that fills in masked tokens of Python's own documentation.

    trainkit train experiment=masked_lm

15 % of the tokens are masked, others in each epoch, and only these make the loss. So
two micro-batches with equally many tokens have different weights: the masked tokens
have to be counted, not all tokens (mosaicml/composer#3677).
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor
from trainkit.recipes import tokenizer  # type: ignore[import-not-found]
from transformers import BertConfig, BertForMaskedLM

from trainkit import (
    AccumulationMixin,
    PadCollate,
    ResumableLoader,
    TokenBudgetSampler,
)

Batch = dict[str, Tensor]
Row = dict[str, Any]

PAD, MASK = 0, 1  # ids, in the order of SPECIAL
SPECIAL = ("[PAD]", "[MASK]")
IGNORED = -100

# ---- data ----------------------------------------------------------------------------


def read_paragraphs() -> list[str]:
    """The paragraphs of `help()` on the language, some 2,000."""
    from pydoc_data.topics import topics

    found = (text for topic in topics.values() for text in topic.split("\n\n"))
    return [text for text in dict.fromkeys(found) if len(text) > 40]


class Paragraphs(LightningDataModule):
    """Paragraphs in batches of like length, under a budget of tokens.

    Args:
        tokens: how many tokens a micro-batch has at most, padding included.
        vocab_size: how many tokens of byte-level BPE are learned from the rows to
            train on.
        max_length: how many tokens of a paragraph are kept.
        num_train: paragraphs to train on, at most.
        num_val: paragraphs to validate on.
        masked: share of the tokens that are to be filled in.
        seed: of the split, of the order of each epoch, and of what is masked.
        num_workers: processes that load.
    """

    def __init__(
        self,
        *,
        tokens: int = 512,
        vocab_size: int = 1024,
        max_length: int = 128,
        num_train: int = 2000,
        num_val: int = 150,
        masked: float = 0.15,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.tokens = tokens
        self.vocab_size = vocab_size
        self.max_length = max_length
        self.num_train = num_train
        self.num_val = num_val
        self.masked = masked
        self.seed = seed
        self.num_workers = num_workers
        self.collate = PadCollate({"labels": IGNORED}, mask="attention_mask")
        self.collate_unmasked = PadCollate(mask="attention_mask")

    def setup(self, stage: str) -> None:
        texts = read_paragraphs()
        order = torch.Generator().manual_seed(self.seed)
        shuffled = torch.randperm(len(texts), generator=order).tolist()
        chosen = [texts[n] for n in shuffled[: self.num_val + self.num_train]]
        bpe = tokenizer.byte_bpe(
            chosen[self.num_val :], vocab_size=self.vocab_size, special=SPECIAL
        )
        rows: list[Row] = [
            {"input_ids": torch.tensor(ids[: self.max_length]), "row": place}
            for place, ids in enumerate(tokenizer.encode(bpe, chosen))
        ]
        self.train_rows = rows[self.num_val :]
        # Masked once, so that validations can be compared.
        self.val_rows = [self.mask_row(row, epoch=0) for row in rows[: self.num_val]]

    def mask_row(self, row: Row, *, epoch: int) -> Row:
        """Mask a row. Seed, row and epoch alone decide what is masked, so that a run
        resumes exactly, in any batch, rank or process."""
        seed = (self.seed * 1_000_003 + epoch) * 1_000_003 + int(row["row"])
        ids, labels = mask(
            row["input_ids"],
            share=self.masked,
            vocab_size=self.vocab_size,
            generator=torch.Generator().manual_seed(seed % 2**63),
        )
        return {"input_ids": ids, "labels": labels}

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Mask the rows of a training batch: here, since the loader does not know the
        epoch, and the strategy counts labels before `training_step` runs."""
        if "row" not in batch:
            return batch
        lengths = batch["attention_mask"].sum(1).tolist()
        assert self.trainer is not None
        rows = [
            self.mask_row(
                {"input_ids": ids[:length], "row": row},
                epoch=self.trainer.current_epoch,
            )
            for ids, row, length in zip(
                batch["input_ids"], batch["row"], lengths, strict=True
            )
        ]
        return self.collate(rows)

    def train_dataloader(self) -> ResumableLoader:
        lengths = [len(row["input_ids"]) for row in self.train_rows]
        return ResumableLoader(
            self.train_rows,
            batch_sampler=TokenBudgetSampler(
                lengths, tokens=self.tokens, seed=self.seed
            ),
            collate_fn=self.collate_unmasked,
            num_workers=self.num_workers,
        )

    def val_dataloader(self) -> ResumableLoader:
        return ResumableLoader(self.val_rows, batch_size=32, collate_fn=self.collate)


def mask(
    ids: Tensor, *, share: float, vocab_size: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Choose tokens at random: 80 % of these become [MASK], 10 % any other token, and
    10 % stay (Devlin et al. 2018, arXiv 1810.04805).

    Args:
        ids: the tokens of one row.
        share: the probability with which each token is chosen.
        vocab_size: how many tokens there are.
        generator: the source of randomness.

    Returns:
        The model's input, and the labels: -100 for tokens that are not chosen.
    """
    chosen, how = torch.rand(2, len(ids), generator=generator)
    other = torch.randint(len(SPECIAL), vocab_size, ids.shape, generator=generator)
    is_chosen = chosen < share
    seen = torch.where(is_chosen & (how < 0.8), MASK, ids)
    seen = torch.where(is_chosen & (how >= 0.9), other, seen)
    return seen, torch.where(is_chosen, ids, IGNORED)


# ---- model ---------------------------------------------------------------------------


class MaskedLM(AccumulationMixin, LightningModule):
    """A small BERT of `transformers` with random weights: nothing is downloaded.

    The configuration chooses its strategy and optimizer. Labels are not shifted: each
    is at its token's place.

    Args:
        vocab_size: how many tokens there are.
        hidden_size: width.
        num_layers: depth.
        num_heads: of attention.
        max_length: the longest sequence it can read.
        dropout: in every layer.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 1024,
        hidden_size: int = 128,
        num_layers: int = 2,
        num_heads: int = 2,
        max_length: int = 128,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=4 * hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            max_position_embeddings=max_length,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            pad_token_id=PAD,
        )
        self.model = BertForMaskedLM(config)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.model(**batch).loss  # the mean over the masked tokens

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        num_labels = (batch["labels"] != IGNORED).sum()
        loss = self.model(**batch).loss
        self.log_exact("val/loss", loss, weight=num_labels, prog_bar=True)


if __name__ == "__main__":
    from trainkit.cli.script import train_file

    train_file(__file__, "experiment=masked_lm", model="MaskedLM", data="Paragraphs")
