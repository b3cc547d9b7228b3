"""One ragged work for all frameworks, and its big batch: plain torch, nothing else.

    work = Work.of("epoch", optimizer="sgd")
    net = work.net()
    ...                              # a framework trains it, in windows of 16 sequences
    work.deviation(net)              # as a share of the distance travelled

A small causal language model predicts each token from those before it, and the loss is
the mean over predictions. The rows are read in order, so a window is the same rows in
every framework, on one rank or two. `step` is one window; `epoch` ends with a window of
9 rows, whose last micro-batch is one row; `speed` is larger and long-tailed.
"""

from __future__ import annotations

import dataclasses
import os
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100
ROWS = {"step": 16, "epoch": 41, "speed": 6 * 64}
DTYPES = {"float32": torch.float32, "float64": torch.float64}
# No weight decay: frameworks with optimizers of their own decay in other ways.
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.01, weight_decay=0),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What is to be trained, on what, in which windows.

    Args:
        rows: token ids of each sequence, at least two.
        window: rows of one optimizer step, on all ranks together.
        micro_batch: rows of one forward pass.
        sizes: vocabulary, width and layers of the model.
        optimizer: a key of `OPTIMIZERS`.
        dtype: a key of `DTYPES`: of the weights.
    """

    rows: list[list[int]]
    window: int
    micro_batch: int
    sizes: tuple[int, int, int]
    optimizer: str
    dtype: str

    @classmethod
    def of(cls, name: str, *, optimizer: str = "sgd", dtype: str = "float32") -> Work:
        """One of the works in `ROWS`."""
        large = name == "speed"
        vocabulary, longest = (512, 256) if large else (32, 60)
        return cls(
            rows=ragged_rows(ROWS[name], vocabulary, longest),
            window=64 if large else 16,
            micro_batch=8 if large else 4,
            sizes=(vocabulary, 64, 2) if large else (vocabulary, 32, 1),
            optimizer=optimizer,
            dtype=dtype,
        )

    def as_one_batch(self) -> Work:
        """The same windows, each in one forward pass: what a control trains."""
        return dataclasses.replace(self, micro_batch=self.window)

    @property
    def world_size(self) -> int:
        """The ranks that torchrun started, or 1."""
        return int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def accumulate(self) -> int:
        """Micro-batches of a window on each rank."""
        return self.window // (self.micro_batch * self.world_size)

    @property
    def longest(self) -> int:
        return max(map(len, self.rows))

    def net(self) -> CausalNet:
        """The model as every framework begins with it."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            net = CausalNet(*self.sizes)
        return net.to(DTYPES[self.dtype])

    def make_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](parameters)

    def deviation(self, net: CausalNet) -> float:
        """How far off the weights are, as a share of the distance travelled."""
        start, end = weights(self.net()), weights(self.big_batch())
        return float((weights(net) - end).norm() / (end - start).norm())

    def big_batch(self) -> CausalNet:
        """The reference: each window in one backward pass, in float64."""
        net = self.net().double()
        optimizer = self.make_optimizer(net.parameters())
        for begin in range(0, len(self.rows), self.window):
            batch = pad(self.rows[begin : begin + self.window])
            optimizer.zero_grad()
            loss_of(net(batch["input_ids"]), batch["labels"]).backward()
            optimizer.step()
        return net

    def tokens_per_second(self, net: CausalNet) -> float:
        """Real tokens, without padding, over the windows but the first and the last.

        Read from when forward passes began, so that it asks nothing of a framework,
        and neither its set-up nor its closing down counts. The clock is that of the
        process: what else runs on the machine takes no part.
        """
        begins, num_rows = [], 0
        for seconds, rows in net.seen:
            if num_rows % self.window == 0:
                begins.append(seconds)
            num_rows += rows
        assert num_rows == len(self.rows), f"{num_rows} rows of {len(self.rows)}"
        between = self.rows[self.window : self.window * (len(begins) - 1)]
        return sum(map(len, between)) / (begins[-1] - begins[1])


def ragged_rows(number: int, vocabulary: int, longest: int) -> list[list[int]]:
    """Sequences with a long tail of lengths and a rule to learn, some of it noise."""
    source = random.Random(0)
    rows = []
    for _ in range(number):
        drawn = int(source.lognormvariate(0, 0.9) * longest / 5)
        row = [source.randrange(vocabulary)]
        for _ in range(min(longest, max(2, drawn)) - 1):
            is_noise = source.random() < 0.2
            after = (3 * row[-1] + 1) % vocabulary
            row.append(source.randrange(vocabulary) if is_noise else after)
        rows.append(row)
    return rows


def pad(rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Collate rows: labels are the ids themselves, those of padding are ignored."""
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    labels = torch.full_like(ids, IGNORED)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = labels[i, : len(row)] = torch.tensor(row)
    return {"input_ids": ids, "labels": labels}


def pad_as_pair(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """The same, for frameworks that take inputs and targets."""
    batch = pad(rows)
    return batch["input_ids"], batch["labels"]


def loss_of(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """Cross entropy of each token, predicted from those before it."""
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1),
        labels[:, 1:].flatten(),
        ignore_index=IGNORED,
        reduction=reduction,
    )


def weights(net: nn.Module) -> Tensor:
    """All parameters as one float64 vector."""
    return torch.cat([p.detach().double().flatten() for p in net.parameters()])


class CausalNet(nn.Module):
    """Transformer blocks. Attention is causal, so padding on the right is not seen."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        self.seen: list[tuple[float, int]] = []  # when, and how many rows

    def hidden(self, ids: Tensor) -> Tensor:
        if self.training:
            self.seen.append((time.process_time(), len(ids)))
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.norm(hidden)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.hidden(ids))


class Block(nn.Module):
    """Attention with four heads and a smooth MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        # No ReLU: where rounding carries it over its kink, gradients differ by 1e-4.
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.mix(self.norms[0](hidden)).unflatten(-1, (3, 4, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(-2))
        return hidden + self.mlp(self.norms[1](hidden))
