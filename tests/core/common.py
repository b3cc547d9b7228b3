"""Losses, cuts and comparisons that the tests of the core share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers import VOCABULARY, TokenNet, gradients, pad, token_loss
from trainkit import AccumulationStrategy, Accumulator, WindowStats

Loss = Callable[[nn.Module, Any, str], Tensor]

CLASS_WEIGHTS = torch.linspace(0.05, 3.0, VOCABULARY, dtype=torch.float64)


def token_losses(net: nn.Module, batch: Any, **options: Any) -> Tensor:
    """The loss of every token, as a table; 0 where the label is ignored."""
    logits = net(batch["ids"])
    losses = F.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), reduction="none", **options
    )
    return losses.view_as(batch["labels"])


def sample_loss(net: nn.Module, batch: Any, reduction: str) -> Tensor:
    """Over samples, of the mean over each one's tokens."""
    counts = (batch["labels"] != -100).sum(1)
    means = token_losses(net, batch).sum(1) / counts
    return means.mean() if reduction == "mean" else means.sum()


def class_weighted_loss(net: nn.Module, batch: Any, reduction: str) -> Tensor:
    """Cross entropy with class weights: "mean" divides by the weights' sum."""
    logits = net(batch["ids"]).flatten(0, 1)
    return F.cross_entropy(
        logits,
        batch["labels"].flatten(),
        weight=CLASS_WEIGHTS.to(logits.dtype),
        reduction=reduction,
    )


def smoothed_loss(net: nn.Module, batch: Any, reduction: str) -> Tensor:
    """Cross entropy with label smoothing."""
    logits = net(batch["ids"]).flatten(0, 1)
    labels = batch["labels"].flatten()
    return F.cross_entropy(logits, labels, label_smoothing=0.1, reduction=reduction)


class ByClass(AccumulationStrategy):
    """A strategy of one's own: the denominator of class-weighted cross entropy."""

    def __init__(self, loss_reduction: Any = "mean") -> None:
        self.loss_reduction = loss_reduction

    def weight(self, batch: Any) -> Tensor:
        labels = batch["labels"]
        return (CLASS_WEIGHTS[labels.clamp(min=0)] * (labels != -100)).sum()


class GivenWeight(AccumulationStrategy):
    """For tests that say the weight themselves."""

    def weight(self, batch: Any) -> Any:
        return batch


def padded(samples: Sequence[Any], extra: int = 0) -> dict[str, Tensor]:
    """`pad`, with columns of nothing but padding appended."""
    batch = pad(samples)
    return {
        "ids": F.pad(batch["ids"], (0, extra)),
        "labels": F.pad(batch["labels"], (0, extra), value=-100),
    }


def run_window(
    net: nn.Module,
    micro_batches: Iterable[Any],
    strategy: AccumulationStrategy | Accumulator,
    loss: Loss = token_loss,
) -> WindowStats:
    """Accumulate one window; its gradients stay in the net."""
    accumulator = (
        strategy if isinstance(strategy, Accumulator) else Accumulator(strategy)
    )
    reduction = accumulator.strategy.loss_reduction
    for batch in micro_batches:
        accumulator.backward(loss(net, batch, reduction), batch)
    return accumulator.finish(net.parameters())


def average_window(
    net: nn.Module, micro_batches: Sequence[Any], loss: Loss = token_loss
) -> Tensor:
    """What everybody does: each loss divided by the number of micro-batches."""
    for batch in micro_batches:
        (loss(net, batch, "mean") / len(micro_batches)).backward()
    return gradients(net)


def big_batch(
    net: nn.Module, batch: Any, loss: Loss = token_loss
) -> tuple[Tensor, Tensor]:
    """The gradient and the loss of everything at once."""
    value = loss(net, batch, "mean")
    value.backward()
    return gradients(net), value.detach()


def fresh_net(dtype: torch.dtype = torch.float64) -> TokenNet:
    return TokenNet(dtype=dtype)


def relative(found: Tensor, reference: Tensor) -> float:
    """The size of the difference, as a share of the reference's size."""
    return float((found - reference).norm() / reference.norm())
