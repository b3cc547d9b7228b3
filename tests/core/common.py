"""Losses, cuts, windows and comparisons that the tests of the core share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.helpers import VOCABULARY, TokenNet, gradients, pad, token_loss
from tests.zoo.modules import sample_loss
from trainkit import (
    AccumulationStrategy,
    Accumulator,
    PerClassWeight,
    PerSample,
    PerToken,
    WindowStats,
)
from trainkit.core import accumulator as of_accumulator
from trainkit.core import division as of_division

Loss = Callable[[nn.Module, Any, str], Tensor]

# ---- losses --------------------------------------------------------------------------

CLASS_WEIGHTS = torch.linspace(0.05, 3.0, VOCABULARY, dtype=torch.float64)


def cross_entropy(
    net: nn.Module, batch: Any, reduction: str = "mean", **options: Any
) -> Tensor:
    """Cross entropy in the net's own dtype; `weight`, for one, is an option."""
    logits = net(batch["ids"]).flatten(0, 1)
    if "weight" in options:
        options["weight"] = options["weight"].to(logits.dtype)
    labels = batch["labels"].flatten()
    return F.cross_entropy(logits, labels, reduction=reduction, **options)


def token_losses(net: nn.Module, batch: Any) -> Tensor:
    """The loss of every token, as a table; 0 where the label is ignored."""
    return cross_entropy(net, batch, "none").view_as(batch["labels"])


def masked_loss(net: nn.Module, batch: Any, reduction: str, *, mask: str) -> Tensor:
    """A mean with real-valued weights of tokens or of samples divides by their sum."""
    losses = token_losses(net, batch)
    losses = losses.sum(1) if mask == "sample_mask" else losses
    total = (losses * batch[mask]).sum()
    return total / batch[mask].sum() if reduction == "mean" else total


def kl_of(net: nn.Module, batch: Any, reduction: str = "mean") -> Tensor:
    """Something of each sample: how far its mean output is from a uniform one."""
    valid = (batch["labels"] != -100).unsqueeze(-1)
    mean = (net(batch["ids"]) * valid).sum(1) / valid.sum(1)
    each = -F.log_softmax(mean, -1).mean(-1)
    return each.mean() if reduction == "mean" else each.sum()


class Case(NamedTuple):
    """A loss, the strategy that counts its denominator, and one that does not."""

    strategy: Callable[..., Any]
    loss: Loss
    wrong: AccumulationStrategy


CASES = {
    "tokens": Case(PerToken, token_loss, PerSample()),
    "samples": Case(PerSample, sample_loss, PerToken()),
    "class weights": Case(  # pytorch#72047
        partial(PerClassWeight, weight=CLASS_WEIGHTS),
        partial(cross_entropy, weight=CLASS_WEIGHTS),
        PerSample(),
    ),
    "label smoothing": Case(  # transformers#46731, #47261
        PerToken, partial(cross_entropy, label_smoothing=0.1), PerSample()
    ),
    "token mask": Case(  # keras#19740, #20410
        partial(PerToken, mask="token_mask"),
        partial(masked_loss, mask="token_mask"),
        PerSample(),
    ),
    "sample mask": Case(
        partial(PerSample, mask="sample_mask"),
        partial(masked_loss, mask="sample_mask"),
        PerToken(),
    ),
}

# ---- batches -------------------------------------------------------------------------

IGNORED = {"ids": torch.zeros(2, 5).long(), "labels": torch.full((2, 5), -100)}
"""A micro-batch in which nothing counts."""


def padded(samples: Sequence[Any], extra: int = 0) -> dict[str, Tensor]:
    """`pad`, with columns of nothing but padding appended, and with both masks."""
    batch = pad(samples)
    ids = F.pad(batch["ids"], (0, extra))
    labels = F.pad(batch["labels"], (0, extra), value=-100)
    token_mask = 0.37 * (1 + ids % 5).double() * (labels != -100)
    sample_mask = 0.3 + (ids * (labels != -100)).sum(1).double() % 7
    masks = {"token_mask": token_mask, "sample_mask": sample_mask}
    return {"ids": ids, "labels": labels, **masks}


def cut(samples: Sequence[Any], sizes: Iterable[int]) -> list[dict[str, Tensor]]:
    """Micro-batches of so many samples."""
    rest = iter(samples)
    return [padded([next(rest) for _ in range(size)]) for size in sizes]


def joined(micro_batches: Iterable[Any]) -> dict[str, Tensor]:
    """The rows of several micro-batches as one batch."""
    rows = [zip(batch["ids"], batch["labels"], strict=True) for batch in micro_batches]
    real = [(ids[y != -100], y[y != -100]) for each in rows for ids, y in each]
    return padded([(ids, labels) for ids, labels in real if len(labels)])


# ---- windows -------------------------------------------------------------------------


class GivenWeight(AccumulationStrategy):
    """A strategy of one's own, for tests that say the weight themselves."""

    def __init__(self, loss_reduction: Any = "mean") -> None:
        self.loss_reduction = loss_reduction

    def weight(self, batch: Any) -> Any:
        return batch


class Toy:
    """One parameter, whose gradient is the weighted mean of the losses of a window."""

    def __init__(
        self,
        *,
        dtype: torch.dtype = torch.float64,
        reduction: str = "mean",
        **options: Any,
    ) -> None:
        self.parameter = nn.Parameter(torch.ones((), dtype=dtype))
        self.accumulator = Accumulator(GivenWeight(reduction), **options)

    def add(self, loss: Any, weight: Any = None, **options: Any) -> None:
        """Run a micro-batch."""
        self.accumulator.backward(self.parameter * loss, weight, **options)

    def finish(self, **options: Any) -> WindowStats:
        """Close the window."""
        return self.accumulator.finish([self.parameter], **options)

    def window(self, *micro_batches: tuple[Any, Any], **options: Any) -> WindowStats:
        """Run a window of these losses and weights, from a gradient of None."""
        self.parameter.grad = None
        for loss, weight in micro_batches:
            self.add(loss, weight)
        return self.finish(**options)

    @property
    def gradient(self) -> float:
        assert self.parameter.grad is not None
        return float(self.parameter.grad)


def run_window(
    net: nn.Module,
    micro_batches: Iterable[Any],
    strategy: AccumulationStrategy | Accumulator,
    loss: Loss = token_loss,
    *,
    told: bool = False,
) -> WindowStats:
    """Accumulate one window; its gradients stay in the net."""
    is_made = isinstance(strategy, Accumulator)
    accumulator = strategy if is_made else Accumulator(strategy)
    run_open(accumulator, net, micro_batches, loss, told=told)
    return accumulator.finish(net.parameters())


def run_open(
    accumulator: Accumulator,
    net: Any,
    micro_batches: Iterable[Any],
    loss: Loss = token_loss,
    *,
    told: bool = False,
) -> None:
    """Run micro-batches, and leave the window open."""
    if told:
        accumulator.expect(micro_batches)
    is_mean = accumulator.strategy.loss_reduction == "mean"
    for batch in micro_batches:
        accumulator.backward(loss(net, batch, "mean" if is_mean else "sum"), batch)


def average_window(
    net: nn.Module, micro_batches: Sequence[Any], loss: Loss = token_loss
) -> Tensor:
    """What everybody does: each loss divided by the number of micro-batches."""
    for batch in micro_batches:
        (loss(net, batch, "mean") / len(micro_batches)).backward()
    return gradients(net)


def big_batch(
    net: nn.Module, batch: Any, loss: Loss = token_loss, reduction: str = "mean"
) -> tuple[Tensor, Tensor]:
    """The gradient and the loss of everything at once."""
    value = loss(net, batch, reduction)
    value.backward()
    return gradients(net), value.detach()


def fresh_net(dtype: torch.dtype = torch.float64) -> TokenNet:
    return TokenNet(dtype=dtype)


def adding_hook(state, bucket):  # torch reads annotations, and not as text
    """A communication hook of DDP that adds up."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


def read_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tensors be left alone where they are, as on a GPU."""
    for module in (of_accumulator, of_division):
        monkeypatch.setattr(module, "read", lambda value: value)


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """On a GPU the host must wait for nothing in here."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def whole(tensor: Any) -> Any:
    """A tensor that is gathered from its shards, if it has some."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_gradients(module: nn.Module) -> Tensor:
    """All gradients as one float64 vector, gathered from their shards."""
    found = [whole(p.grad) for p in module.parameters() if p.grad is not None]
    return torch.cat([gradient.double().flatten() for gradient in found])


def relative(found: Tensor, reference: Tensor) -> float:
    """The size of the difference, as a share of the reference's size."""
    return float((found - reference).norm() / reference.norm())
