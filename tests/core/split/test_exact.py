"""The loss and the gradient over the micro-batches equal those of the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.core.split.common import Side, ragged
from tests.helpers import deviation, gradients
from trainkit import PerToken
from trainkit.core.split.cutting import Cutter
from trainkit.core.split.micro_batching import MicroBatching

LENGTHS = [9, 2, 5, 14, 1, 7, 3, 3, 12, 6]


class SmallAttention(nn.Module):
    """Attention that looks at whatever the mask lets it see, in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(9, 8)
        self.qkv = nn.Linear(8, 24)
        self.head = nn.Linear(8, 9)
        self.double()

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        query, key, value = self.qkv(self.embed(ids)).chunk(3, dim=-1)
        hidden = mask[:, None, :] == 0
        scores = (query @ key.transpose(1, 2)).masked_fill(hidden, -torch.inf)
        return self.head(scores.softmax(-1) @ value)


def loss_sum(net: nn.Module, batch: Any) -> Tensor:
    logits = net(batch["ids"], batch["attention_mask"])
    targets = batch["labels"].view(-1)  # needs contiguous micro-batches
    return F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")


def step(batches: list[Any]) -> tuple[float, Tensor]:
    """Loss and gradient of a window whose batches are weighed by their tokens."""
    net = SmallAttention()
    total = sum(int(PerToken().weight(batch)) for batch in batches)
    losses = []
    for batch in batches:
        loss = loss_sum(net, batch) / total
        loss.backward()
        losses.append(loss.item())
    return sum(losses), gradients(net)


@pytest.mark.parametrize("side", ["right", "left", "mixed"])
@pytest.mark.parametrize(
    "options",
    [{"tokens": 24}, {"tokens": 24, "size": 2}, {"size": 3}, {"size": 1}, {}],
    ids=str,
)
def test_step_of_cut_window_equals_that_of_the_whole(
    side: Side, options: dict[str, int]
) -> None:
    batch = ragged(LENGTHS, side=side)
    micros = Cutter(MicroBatching(**options), PerToken()).cut(batch)  # type: ignore[arg-type]
    loss, gradient = step([micro.batch for micro in micros])
    whole_loss, whole_gradient = step([batch])
    assert loss == pytest.approx(whole_loss, rel=1e-12)
    origin = torch.zeros_like(whole_gradient)
    assert deviation(gradient, whole_gradient, origin) < 1e-9
    if options.get("size") != 1 and options:
        # Negative control: a mean of the micro-batches' means is another gradient.
        means = []
        for micro in micros:
            _, each = step([micro.batch])
            means.append(each / len(micros))
        assert deviation(sum(means), whole_gradient, origin) > 1e-3


def test_labels_alone_cut_the_same_step() -> None:
    batch = ragged(LENGTHS)
    whole = step([batch])[1]
    mask = batch.pop("attention_mask")
    micros = Cutter(MicroBatching(tokens=24), PerToken()).cut(batch)
    batches = [
        {
            **micro.batch,
            "attention_mask": mask[micro.rows, : micro.batch["ids"].shape[1]],
        }
        for micro in micros
    ]
    assert len(batches) > 1
    assert deviation(step(batches)[1], whole, torch.zeros_like(whole)) < 1e-9
