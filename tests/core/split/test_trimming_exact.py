"""Training in trimmed micro-batches equals training on whole batches, step after step,
whatever the later batches are like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.core.split.common import mask_of
from tests.helpers import deviation, weights
from trainkit import AccumulationStrategy, PerSample, PerToken
from trainkit.core.split.cutting import Cutter
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.split.trimming import Trimming

Batch = dict[str, Any]


class Translator(nn.Module):
    """A mean over the sources that the mask shows, and a prediction for each target."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.source = nn.Embedding(12, 6)
        self.target = nn.Embedding(12, 6)
        self.features = nn.Linear(6, 6)
        self.head = nn.Linear(6, 12)
        self.double()

    def forward(self, batch: Batch) -> Tensor:
        mask = batch["attention_mask"].unsqueeze(2)
        seen = (self.source(batch["ids"]) * mask).sum(1) / mask.sum(1)
        if "features" in batch:
            seen = seen + self.features(batch["features"]).tanh()
        targets = self.target(batch.get("decoder", batch["ids"]))
        return self.head((targets + seen.unsqueeze(1)).tanh())


def token_sum(net: Translator, batch: Batch) -> Tensor:
    logits = net(batch).flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"].reshape(-1), reduction="sum")


def row_sum(net: Translator, batch: Batch) -> Tensor:
    """A target for each row and column, whose own mask says which of them count."""
    error = (net(batch)[..., 0] - batch["y"]) ** 2 * batch["y_mask"]
    return (error.sum(1) / batch["y_mask"].sum(1)).sum()


def trained(
    batches: Sequence[Batch],
    loss_sum: Callable[[Translator, Batch], Tensor],
    strategy: AccumulationStrategy,
    cutter: Cutter | None = None,
) -> tuple[list[float], Tensor]:
    """The losses and the weights after a step of SGD with each batch."""
    net = Translator()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for batch in batches:
        parts = [batch] if cutter is None else [m.batch for m in cutter.cut(batch)]
        total = float(strategy.weight(batch))
        optimizer.zero_grad()
        of_parts = [loss_sum(net, part) / total for part in parts]
        for loss in of_parts:
            loss.backward()
        optimizer.step()
        losses.append(sum(loss.item() for loss in of_parts))
    return losses, weights(net)


def draw(lengths: Sequence[int], padded_length: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mask = mask_of(lengths, padded_length=padded_length)
    return torch.randint(1, 12, mask.shape, generator=generator) * mask


def pair(
    sources: Sequence[int], targets: Sequence[int], *, pad: tuple[int, int] = (16, 16)
) -> Batch:
    """Sources with a mask, and targets without one."""
    decoder = draw(targets, pad[1], seed=1)
    labels = draw(targets, pad[1], seed=2).masked_fill(decoder == 0, -100)
    return {
        "ids": draw(sources, pad[0], seed=3),
        "attention_mask": mask_of(sources, padded_length=pad[0]),
        "decoder": decoder,
        "labels": labels,
    }


def left_out() -> Batch:
    """The mask leaves out tokens whose labels count, as in prefixes that are hidden."""
    batch = pair([16, 6, 9, 4], [16, 6, 9, 4])
    batch["attention_mask"][1, 3:] = 0
    batch["attention_mask"][2, 4:] = 0
    batch["ids"] = batch["ids"] * batch["attention_mask"]
    del batch["decoder"]
    return batch


def with_y(sources: Sequence[int], targets: Sequence[int], *, tail: float) -> Batch:
    batch = pair(sources, targets)
    del batch["labels"]
    mask = mask_of(targets, padded_length=16)
    y = torch.randn(mask.shape, generator=torch.Generator().manual_seed(5))
    y = torch.where(torch.arange(16) < 3, y.double(), tail)
    batch["decoder"] = torch.where(torch.arange(16) < 3, batch["decoder"], 0)
    return {**batch, "y": y * mask, "y_mask": mask}


def featured(batch: Batch) -> Batch:
    rows = len(batch["ids"])
    generator = torch.Generator().manual_seed(6)
    return {**batch, "features": torch.randn(rows, 6, generator=generator).double()}


SHORT = pair([16, 5, 9, 3], [16, 4, 8, 2])

LATER: dict[str, tuple[list[Batch], str | None]] = {
    "longer targets": ([SHORT, pair([16, 5, 9, 3], [16, 12, 16, 7])], "'decoder'"),
    "hidden tokens": ([SHORT, left_out()], "'labels'"),
    "lengths differ": (
        [pair([9, 3], [9, 2], pad=(9, 9)), pair([8, 4], [5, 2], pad=(8, 5))],
        None,
    ),
    "lengths agree": (
        [pair([8, 4], [5, 2], pad=(8, 5)), pair([9, 3], [9, 7], pad=(9, 9))],
        None,
    ),
    "features": (
        [featured(SHORT), featured(pair([6, 2, 3], [5, 2, 1], pad=(6, 6)))],
        None,
    ),
    "features at first": (
        [featured(pair([6, 2, 3], [5, 2, 1], pad=(6, 6))), featured(SHORT)],
        "'features'",
    ),
}

CUTS = [MicroBatching(size=2), MicroBatching(tokens=40), MicroBatching(size=1)]


def warned(named: str | None) -> AbstractContextManager[Any]:
    return nullcontext() if named is None else pytest.warns(UserWarning, match=named)


@pytest.mark.parametrize("options", CUTS, ids=["rows", "tokens", "single rows"])
@pytest.mark.parametrize("name", LATER)
def test_weights_equal_those_of_whole_batches(
    name: str, options: MicroBatching
) -> None:
    batches, named = LATER[name]
    strategy = PerToken()
    with warned(named):
        losses, cut = trained(batches, token_sum, strategy, Cutter(options, strategy))
    expected, whole = trained(batches, token_sum, strategy)
    assert losses == pytest.approx(expected, rel=1e-12)
    assert deviation(cut, whole, weights(Translator())) < 1e-12


@pytest.mark.parametrize("options", CUTS, ids=["rows", "tokens", "single rows"])
def test_weights_of_targets_with_a_mask_of_their_own_equal_those_of_whole_batches(
    options: MicroBatching,
) -> None:
    """Everything behind the sources' ends is constant, and counts."""
    batches = [
        with_y([16, 5, 9, 3], [16, 4, 8, 2], tail=0.3),
        with_y([16, 5, 9, 3], [16, 16, 16, 16], tail=0.3),
    ]
    strategy = PerSample()
    with warned("'y_mask'"):
        losses, cut = trained(batches, row_sum, strategy, Cutter(options, strategy))
    expected, whole = trained(batches, row_sum, strategy)
    assert losses == pytest.approx(expected, rel=1e-12)
    assert deviation(cut, whole, weights(Translator())) < 1e-12


def test_trimming_without_a_look_gives_other_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control of both tests above."""
    monkeypatch.setattr(Trimming, "_why_not", lambda *args: None)
    for name in ("longer targets", "hidden tokens"):
        batches, _ = LATER[name]
        cutter = Cutter(CUTS[0], PerToken())
        cut = trained(batches, token_sum, PerToken(), cutter)[1]
        whole = trained(batches, token_sum, PerToken())[1]
        assert deviation(cut, whole, weights(Translator())) > 1e-2
    batches = [with_y([16, 5, 9, 3], [16, 16, 16, 16], tail=0.3)]
    cut = trained(batches, row_sum, PerSample(), Cutter(CUTS[0], PerSample()))[1]
    whole = trained(batches, row_sum, PerSample())[1]
    assert deviation(cut, whole, weights(Translator())) > 1e-2
