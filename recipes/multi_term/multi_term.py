"""A loss of two terms with two denominators: a sequence VAE on Python's own names.

    trainkit train experiment=multi_term
    trainkit train -m experiment=multi_term accumulation=none,per_token,per_sample

The reconstruction is a mean over characters, the KL divergence is a mean over names. A
micro-batch with few long names has many characters and few names, so no single weight
is right for the sum of both terms: each term has a strategy of its own.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn

from trainkit import AccumulationMixin, PadCollate, PerSample, PerToken, ResumableLoader

Batch = dict[str, Tensor]
END = ord("\n")  # before the first character and after the last one
IGNORED = -100

# ---- data ----------------------------------------------------------------------------


NAME = re.compile(rb"^ *(?:async )?(?:def|class) (\w+)", re.MULTILINE)


def read_names() -> list[bytes]:
    """The names of all functions and classes in the top-level modules of this
    interpreter, each once, in alphabetical order."""
    sources = Path(sysconfig.get_path("stdlib")).glob("*.py")
    return sorted(
        {name for path in sources for name in NAME.findall(path.read_bytes())}
    )


# The mask has the names' lengths, by which split windows cut them.
PAD = PadCollate({"labels": IGNORED}, mask="attention_mask")


def collate(rows: Sequence[tuple[int, bytes]]) -> Batch:
    """Pad to the longest; the label of each character is the next one."""
    return PAD(
        [
            {"ids": [END, *name], "labels": [*name, END], "row": row}
            for row, name in rows
        ]
    )


class Names(LightningDataModule):
    """Names as byte ids with their noise, split into training and validation.

    Args:
        batch_size: names in a batch of the loader, which is one optimizer step.
        latent: dimensions of the noise.
        num_train: names to train on, at most.
        num_val: names to validate on.
        seed: of the split and of the order of each epoch.
        num_workers: processes that load.
    """

    def __init__(
        self,
        *,
        batch_size: int = 64,
        latent: int = 16,
        num_train: int = 100_000,
        num_val: int = 400,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.latent = latent
        self.num_train = num_train
        self.num_val = num_val
        self.seed = seed
        self.num_workers = num_workers

    def setup(self, stage: str) -> None:
        names = read_names()
        order = torch.Generator().manual_seed(self.seed)
        shuffled = [names[i] for i in torch.randperm(len(names), generator=order)]
        rows = list(enumerate(shuffled[: self.num_val + self.num_train]))
        self.val_rows, self.train_rows = rows[: self.num_val], rows[self.num_val :]

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Batch:
        """Draw the noise: here, since the loader does not know the epoch, and before a
        batch is cut."""
        assert self.trainer is not None
        epoch = self.trainer.current_epoch if self.trainer.training else 0
        return self.with_noise(batch, epoch=epoch)

    def with_noise(self, batch: Batch, *, epoch: int) -> Batch:
        """Add noise to a batch. It depends on seed, epoch and row alone, and not on the
        cut, the rank or the process that reads a row."""
        noise = []
        for row in batch["row"].tolist():
            seed = (self.seed * 1_000_003 + epoch) * 1_000_003 + row
            generator = torch.Generator().manual_seed(seed % 2**63)
            noise.append(torch.randn(self.latent, generator=generator))
        return {**batch, "noise": torch.stack(noise)}

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
        return ResumableLoader(self.val_rows, batch_size=100, collate_fn=collate)


# ---- model ---------------------------------------------------------------------------


class NameVAE(AccumulationMixin, LightningModule):
    """A recurrent encoder and decoder with a Gaussian latent variable between them.

    Args:
        width: the width of embeddings and recurrent layers.
        latent: dimensions of the latent variable.
        beta: the factor of the KL divergence of a name, against the mean cross entropy
            of a character. 1 over the mean length gives the evidence lower bound.
    """

    def __init__(
        self, *, width: int = 96, latent: int = 16, beta: float = 0.03
    ) -> None:
        super().__init__()
        self.accumulation = {"ce": PerToken(), "kl": PerSample()}
        self.beta = beta
        self.embed = nn.Embedding(128, width)
        self.encoder = nn.GRU(width, width, batch_first=True)
        self.moments = nn.Linear(width, 2 * latent)
        self.decoder = nn.GRU(width + latent, width, batch_first=True)
        self.head = nn.Linear(width, 128)

    def encode(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Mean and logarithm of the variance, read after each name's last character."""
        hidden, _ = self.encoder(self.embed(batch["ids"]))
        last = (batch["labels"] != IGNORED).sum(1) - 1
        rows = torch.arange(len(last), device=last.device)
        mean, log_variance = self.moments(hidden[rows, last]).chunk(2, dim=-1)
        return mean, log_variance

    def decode(self, ids: Tensor, latent: Tensor) -> Tensor:
        repeated = latent.unsqueeze(1).expand(-1, ids.shape[1], -1)
        hidden, _ = self.decoder(torch.cat([self.embed(ids), repeated], dim=-1))
        return self.head(hidden)

    def terms(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Mean cross entropy of a character, and mean KL divergence of a name."""
        mean, log_variance = self.encode(batch)
        latent = mean + batch["noise"] * (log_variance / 2).exp()
        logits = self.decode(batch["ids"], latent)
        ce = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        kl = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean() / 2
        return ce, kl

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        ce, kl = self.terms(batch)
        if not isinstance(self.accumulation, dict):  # one strategy, for comparison
            return ce + self.beta * kl
        self.log("train/ce", ce)
        self.log("train/kl", kl, weight="kl")
        return {"loss": {"ce": ce, "kl": self.beta * kl}}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        ce, kl = self.terms(batch)
        num_names = len(batch["ids"])
        num_characters = (batch["labels"] != IGNORED).sum()
        self.log_exact("val/ce", ce, weight=num_characters)
        self.log_exact("val/kl", kl, weight=num_names)
        # The negative evidence lower bound: what a name costs at most, in nats.
        bound = ce * num_characters / num_names + kl
        self.log_exact("val/bound", bound, weight=num_names, prog_bar=True)


if __name__ == "__main__":
    from trainkit.cli.script import train_file

    train_file(__file__, "experiment=multi_term", model="NameVAE", data="Names")
