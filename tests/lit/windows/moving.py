"""A module whose loss depends on state that is moved once a batch, or once a step."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.lit.fronts import Mixed

WAYS = (
    "in place",
    "by data",
    "data replaced",
    "buffer",
    "buffer replaced",
    "queue",
    "float",
)
NAMES = {
    "buffer": "center",
    "buffer replaced": "center",
    "queue": "queue",
    "float": "offset",
}
ONCE = "on_before_optimizer_step"


class Moving(Mixed):
    """Learns from a momentum encoder, a centre and a queue as well; one of them moves.

    Args:
        where: the hook in which it is moved.
        way: what is moved, and how.
    """

    center: Tensor

    def __init__(self, where: str, way: str, **how: Any) -> None:
        super().__init__(**how)
        self.where, self.way = where, way
        self.follower = copy.deepcopy(self.net).requires_grad_(False)
        width = self.net.head.out_features
        self.register_buffer("center", torch.zeros(width, dtype=torch.float64))
        self.queue = torch.zeros(6, width, dtype=torch.float64)
        self.offset = 0.0
        self.seen: list[tuple[Tensor, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        keep = batch["labels"] != -100
        logits = self.net(batch["ids"])[keep]
        with torch.no_grad():
            taught = self.follower(batch["ids"])[keep]
        target = taught - self.center + self.queue.mean(0) - self.offset
        loss = F.cross_entropy(logits, batch["labels"][keep])
        self.seen.append((taught.sum(0), len(taught)))
        if self.where == "training_step":
            self.move()
        return loss + (logits - target).square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.where == ONCE:
            self.move()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.where == "on_train_batch_end":
            self.move()

    @torch.no_grad()
    def move(self) -> None:
        sums, numbers = zip(*self.seen, strict=True)
        self.seen.clear()
        mean = torch.stack(sums).sum(0) / sum(numbers)
        if self.way == "buffer":
            self.center.mul_(0.8).add_(mean, alpha=0.2)
        elif self.way == "buffer replaced":
            self.center = 0.8 * self.center + 0.2 * mean
        elif self.way == "float":
            self.offset = 0.8 * self.offset + 0.2 * mean.abs().sum().item()
        elif self.way == "queue":
            self.queue = torch.cat([self.queue[1:], mean[None]])
        else:
            self._follow()

    def _follow(self) -> None:
        own, others = self.follower.parameters(), self.net.parameters()
        for mine, other in zip(own, others, strict=True):
            if self.way == "in place":
                mine.mul_(0.8).add_(other, alpha=0.2)
            elif self.way == "by data":
                mine.data.mul_(0.8).add_(other.data, alpha=0.2)
            else:
                mine.data = 0.8 * mine.data + 0.2 * other.data
