"""Fine-tuning on prompt and completion, where only the completion counts.

    trainkit train experiment=completions

The prompt is a function's signature and docstring, the completion is its body. Prompts
have labels of -100, and completions have 2 to some 200 tokens. So the mean over a
micro-batch of one row weighs a token of a short body a hundred times as much as a token
of a long one, and 32 micro-batches of 1 row trained another model than 1 batch of 32
rows did: huggingface/trl#2175.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor
from trainkit.recipes import code_lm, tokenizer  # type: ignore[import-not-found]
from transformers import LlamaConfig, LlamaForCausalLM

from trainkit import AccumulationMixin, PadCollate, PerToken, ResumableLoader

Batch = dict[str, Tensor]
Row = dict[str, list[int]]

IGNORED = -100
END = "<|end|>"  # of a completion; its id, 0, is also what pads rows

# ---- data ----------------------------------------------------------------------------

DOCUMENTED = re.compile(
    r'(?P<prompt> *(?:async )?def [^"]*?:\n\s*r?""".*?"""\n)(?P<completion>.+)',
    re.DOTALL,
)
"""The prompt is a signature and a docstring, the completion is the body."""


def read_pairs() -> list[tuple[str, str]]:
    """Prompt and completion of each function that has a docstring."""
    sources = [
        function.decode(errors="replace") for function in code_lm.read_functions()
    ]
    found = (DOCUMENTED.fullmatch(source) for source in dict.fromkeys(sources))
    return [(pair["prompt"], pair["completion"]) for pair in found if pair]


def as_row(prompt: list[int], completion: list[int], max_length: int) -> Row:
    """One sequence, with labels of -100 for the prompt.

    >>> as_row([5, 6], [7, 8], max_length=3)
    {'input_ids': [5, 6, 7], 'labels': [-100, -100, 7]}
    """
    labels = [IGNORED] * len(prompt) + completion
    return {
        "input_ids": (prompt + completion)[:max_length],
        "labels": labels[:max_length],
    }


class Completions(LightningDataModule):
    """Rows of a prompt and a completion, split into training and validation.

    Args:
        batch_size: rows in a batch of the loader.
        vocab_size: how many tokens of byte-level BPE are learned from the rows to
            train on.
        max_length: how many tokens of a row are kept. Rows whose prompt alone has more
            are left out.
        num_train: rows to train on, at most.
        num_val: rows to validate on.
        seed: of the split and of the order of each epoch.
        num_workers: processes that load.
    """

    def __init__(
        self,
        *,
        batch_size: int = 4,
        vocab_size: int = 1024,
        max_length: int = 256,
        num_train: int = 1200,
        num_val: int = 100,
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
        # The mask says which tokens are no padding, the labels which ones count.
        self.collate = PadCollate({"labels": IGNORED}, mask="attention_mask")

    def setup(self, stage: str) -> None:
        pairs = read_pairs()
        order = torch.Generator().manual_seed(self.seed)
        shuffled = torch.randperm(len(pairs), generator=order).tolist()
        chosen = [pairs[n] for n in shuffled[: self.num_val + self.num_train]]
        rows = self.encode(chosen)
        self.val_rows = self.short_enough(rows[: self.num_val])
        self.train_rows = self.short_enough(rows[self.num_val :])

    def encode(self, pairs: Sequence[tuple[str, str]]) -> list[Row]:
        prompts, completions = zip(*pairs, strict=True)
        texts = [prompt + body for prompt, body in pairs[self.num_val :]]
        bpe = tokenizer.byte_bpe(texts, vocab_size=self.vocab_size, special=[END])
        end = bpe.token_to_id(END)
        pieces = zip(
            tokenizer.encode(bpe, prompts),
            tokenizer.encode(bpe, completions),
            strict=True,
        )
        return [
            as_row(prompt, [*completion, end], self.max_length)
            for prompt, completion in pieces
        ]

    @staticmethod
    def short_enough(rows: Sequence[Row]) -> list[Row]:
        """The rows in which something is left to predict."""
        return [row for row in rows if row["labels"][-1] != IGNORED]

    def train_dataloader(self) -> ResumableLoader:
        return ResumableLoader(
            self.train_rows,
            batch_size=self.batch_size,
            shuffle=True,
            seed=self.seed,
            collate_fn=self.collate,
            num_workers=self.num_workers,
        )

    def val_dataloader(self) -> ResumableLoader:
        return ResumableLoader(self.val_rows, batch_size=16, collate_fn=self.collate)


# ---- model ---------------------------------------------------------------------------


class CompletionLM(AccumulationMixin, LightningModule):
    """A causal model of `transformers` with random weights: nothing is downloaded.

    To fine-tune a model that you have, replace `LlamaForCausalLM(config)` by
    `LlamaForCausalLM.from_pretrained(...)`, and `byte_bpe` by its tokenizer.

    Args:
        vocab_size: how many tokens there are.
        hidden_size: width.
        num_layers: depth.
        num_heads: of attention.
        max_length: the longest sequence it can read.
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
            use_cache=False,
            bos_token_id=None,
            eos_token_id=0,
        )
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.model(**batch).loss  # the mean over the labels that count

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        num_labels = (batch["labels"][:, 1:] != IGNORED).sum()
        loss = self.model(**batch).loss
        self.log_exact("val/loss", loss, weight=num_labels, prog_bar=True)


if __name__ == "__main__":
    from trainkit.cli.script import train_file

    train_file(
        __file__, "experiment=completions", model="CompletionLM", data="Completions"
    )
