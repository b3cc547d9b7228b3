"""A loss across rows: a mixture of experts whose load is balanced over a big batch.

    trainkit train experiment=moe

The balance loss multiplies two means over the batch: how often an expert was chosen,
and how likely it was. So plain accumulation balances each micro-batch by itself. With
the inner cut (`MicroBatching(inside="net")`) the whole batch is balanced:
`training_step` runs once on 64 blocks, and only the net runs in chunks of 4.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn

from trainkit import AccumulationMixin, ResumableLoader

NUM_BYTES = 256

# ---- data ----------------------------------------------------------------------------


def read_text() -> bytes:
    """The source of the top-level modules of this interpreter, one after the other."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return b"".join(path.read_bytes() for path in sources)


class Blocks(LightningDataModule):
    """Blocks of Python source as bytes, split into training and validation.

    Args:
        batch_size: blocks in a batch of the loader.
        length: bytes that are predicted in a block.
        num_train: blocks to train on, at most.
        num_val: blocks to validate on.
        seed: of the split and of the order of each epoch.
        num_workers: processes that load.
    """

    def __init__(
        self,
        *,
        batch_size: int = 64,
        length: int = 64,
        num_train: int = 12_800,
        num_val: int = 512,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.length = length
        self.num_train = num_train
        self.num_val = num_val
        self.seed = seed
        self.num_workers = num_workers

    def setup(self, stage: str) -> None:
        text = torch.tensor(list(read_text()), dtype=torch.uint8)
        rows = text.unfold(0, self.length + 1, self.length + 1)
        order = torch.Generator().manual_seed(self.seed)
        chosen = torch.randperm(len(rows), generator=order)
        rows = rows[chosen[: self.num_val + self.num_train]].long()
        self.val_rows, self.train_rows = rows[: self.num_val], rows[self.num_val :]

    def train_dataloader(self) -> ResumableLoader:
        return ResumableLoader(
            self.train_rows,
            batch_size=self.batch_size,
            shuffle=True,
            seed=self.seed,
            num_workers=self.num_workers,
        )

    def val_dataloader(self) -> ResumableLoader:
        # All in one batch: the balance of a part is another one.
        return ResumableLoader(self.val_rows, batch_size=self.num_val)


# ---- net -----------------------------------------------------------------------------


class Experts(nn.Module):
    """Some perceptrons, of which each position is sent to one.

    Args:
        width: of a position.
        num_experts: how many perceptrons there are.
    """

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, num_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
            )
            for _ in range(num_experts)
        )

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and how likely each expert was."""
        chances = self.router(hidden).softmax(-1)
        chance, choice = chances.max(-1)
        out = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            # Nothing is dropped: a limit on an expert's load would be a chunk's.
            mine = choice == number
            out[mine] = expert(hidden[mine]) * chance[mine].unsqueeze(-1)
        return out, chances


class Layer(nn.Module):
    """Causal attention, then experts.

    Args:
        width: of a position.
        num_heads: of attention.
        num_experts: of which each position is sent to one.
    """

    def __init__(self, width: int, num_heads: int, num_experts: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = nn.MultiheadAttention(width, num_heads, batch_first=True)
        self.experts = Experts(width, num_experts)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        length = hidden.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=hidden.device)
        seen = self.norms[0](hidden)
        told, _ = self.attention(
            seen, seen, seen, attn_mask=mask.triu(1), need_weights=False
        )
        hidden = hidden + told
        out, chances = self.experts(self.norms[1](hidden))
        return hidden + out, chances


class Net(nn.Module):
    """A decoder that ends in the loss of each byte: what runs in chunks of rows.

    Args:
        length: the longest block.
        width: of a position.
        num_layers: depth.
        num_heads: of attention.
        num_experts: in each layer.
    """

    def __init__(
        self,
        *,
        length: int,
        width: int,
        num_layers: int,
        num_heads: int,
        num_experts: int,
    ) -> None:
        super().__init__()
        self.byte = nn.Embedding(NUM_BYTES, width)
        self.place = nn.Parameter(0.02 * torch.randn(length, width))
        self.layers = nn.ModuleList(
            Layer(width, num_heads, num_experts) for _ in range(num_layers)
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, NUM_BYTES))

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The cross entropy of each byte, and for each byte and layer how likely each
        expert was."""
        ids, labels = rows[:, :-1], rows[:, 1:]
        hidden = self.byte(ids) + self.place[: ids.shape[1]]
        chances = []
        for layer in self.layers:
            hidden, chance = layer(hidden)
            chances.append(chance)
        logits = self.head(hidden).transpose(1, 2)
        losses = F.cross_entropy(logits, labels, reduction="none")
        return losses, torch.stack(chances, dim=2)


# ---- loss ----------------------------------------------------------------------------


def loads(chances: Tensor) -> Tensor:
    """The share of positions that each expert of each layer gets; 1 if all get alike.

    Args:
        chances: rows x positions x layers x experts.
    """
    num_experts = chances.shape[-1]
    chosen = F.one_hot(chances.argmax(-1), num_experts).to(chances)
    return num_experts * chosen.mean((0, 1))


def balance_loss(chances: Tensor) -> Tensor:
    """1 if all experts get alike, more otherwise (arXiv 2101.03961, equation 4).

    >>> float(balance_loss(torch.eye(2).view(2, 1, 1, 2)))
    1.0

    Args:
        chances: rows x positions x layers x experts.
    """
    return (loads(chances) * chances.mean((0, 1))).sum(-1).mean()


# ---- model ---------------------------------------------------------------------------


class MixtureLM(AccumulationMixin, LightningModule):
    """A small decoder of bytes with experts in each layer.

    It has no strategy: with an inner cut its loss may be anything.

    Args:
        length: the longest block.
        width: of a position.
        num_layers: depth.
        num_heads: of attention.
        num_experts: in each layer.
        balance: the factor of the balance loss.
    """

    def __init__(
        self,
        *,
        length: int = 64,
        width: int = 64,
        num_layers: int = 2,
        num_heads: int = 4,
        num_experts: int = 8,
        balance: float = 0.01,
    ) -> None:
        super().__init__()
        self.balance = balance
        self.net = Net(
            length=length,
            width=width,
            num_layers=num_layers,
            num_heads=num_heads,
            num_experts=num_experts,
        )

    def terms(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The mean cross entropy of a byte, and how likely each expert was."""
        losses, chances = self.net(rows)
        # The other ranks' rows are balanced too; one process has them all.
        gathered: Any = self.all_gather(chances, sync_grads=True)
        return losses.mean(), gathered.flatten(0, -4)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss, chances = self.terms(batch)
        balance = balance_loss(chances)
        self.log("train/ce", loss.detach())
        self.log("train/balance", balance.detach())
        return loss + self.balance * balance

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        loss, chances = self.terms(batch)
        num_rows = len(batch)
        # Each expert of each layer: 1 is an even share of all positions.
        load = loads(chances)
        # The part of a row's positions that its most frequent expert gets.
        alone = torch.stack([loads(row[None]).amax(-1).mean() for row in chances])
        num_experts = load.shape[-1]
        self.log_exact("val/loss", loss, weight=num_rows, prog_bar=True)
        self.log_exact("val/balance", balance_loss(chances), weight=num_rows)
        self.log_exact("val/most_loaded", load.max(), weight=num_rows)
        self.log_exact("val/least_loaded", load.min(), weight=num_rows)
        self.log_exact("val/in_a_row", alone.mean() / num_experts, weight=num_rows)


if __name__ == "__main__":
    from trainkit.cli.script import train_file

    train_file(__file__, "experiment=moe", model="MixtureLM", data="Blocks")
