"""Losses that look across rows, and the step that a test compares."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainkit import Chunked, TrainkitError

ROWS, CLASSES, WIDTH = 22, 5, 6

EXACT = 1e-12
"""How far a gradient in chunks may be from the whole batch's, in float64."""

NAIVE = 1e-3
"""How far a wrong one is, at least."""

Loss = Callable[[Tensor, Tensor], Tensor]


def dice(out: Tensor, labels: Tensor) -> Tensor:
    """One minus the overlap with two classes, counted over the whole batch."""
    chosen = F.one_hot(labels, CLASSES)[:, :2].to(out)
    found = out.softmax(-1)[:, :2]
    return 1 - 2 * (found * chosen).sum() / (found + chosen).sum()


def jaccard(out: Tensor, labels: Tensor) -> Tensor:
    """One minus the intersection over the union, over the whole batch."""
    chosen = F.one_hot(labels, CLASSES).to(out)
    both = (out.softmax(-1) * chosen).sum()
    return 1 - both / ((out.softmax(-1) + chosen).sum() - both)


def nt_xent(out: Tensor, labels: Tensor) -> Tensor:
    """Each row against all others; the next one is its partner."""
    z = F.normalize(out, dim=-1)
    own = torch.eye(len(z), dtype=torch.bool)
    scores = (z @ z.T / 0.5).masked_fill(own, -1e9)
    return F.cross_entropy(scores, torch.arange(len(z)).roll(1))


def class_weighted(out: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy divided by the sum of the labels' weights."""
    return F.cross_entropy(out, labels, weight=torch.linspace(0.1, 3, CLASSES).to(out))


def vicreg(out: Tensor, labels: Tensor) -> Tensor:
    """Variance and covariance of the columns over the batch."""
    z = out - out.mean(0)
    covariance = z.T @ z / (len(z) - 1)
    spread = F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean()
    return spread + covariance.fill_diagonal_(0).square().sum() / z.shape[1]


def summed(out: Tensor, labels: Tensor) -> Tensor:
    """A sum in place of a mean."""
    return F.cross_entropy(out, labels, reduction="sum")


def focal(out: Tensor, labels: Tensor) -> Tensor:
    """Focal loss divided by the batch's sum of focal weights."""
    losses = F.cross_entropy(out, labels, reduction="none")
    weights = (1 - (-losses).exp()).square()
    return (weights * losses).sum() / weights.detach().sum()


def balance(out: Tensor, labels: Tensor) -> Tensor:
    """The balance term of a mixture of experts: shares times mean probabilities."""
    found = out.softmax(-1)
    shares = F.one_hot(found.argmax(-1), CLASSES).to(out).mean(0)
    return CLASSES * (shares * found.mean(0)).sum() + F.cross_entropy(out, labels)


def ranking(out: Tensor, labels: Tensor) -> Tensor:
    """Hinge over all pairs of rows with different labels."""
    score = out[:, 0]
    above = labels[:, None] > labels[None, :]
    return F.relu(1 - score[:, None] + score[None, :])[above].mean()


def hard_triplets(out: Tensor, labels: Tensor) -> Tensor:
    """The farthest of the own class against the nearest of the others."""
    apart = (out[:, None] - out[None, :]).square().sum(-1)
    same = labels[:, None] == labels[None, :]
    farthest = apart.masked_fill(~same, -1).amax(1)
    nearest = apart.masked_fill(same, 1e9).amin(1)
    return F.relu(farthest - nearest + 1).sum() / 7


LOSSES: list[Loss] = [
    dice,
    jaccard,
    nt_xent,
    class_weighted,
    vicreg,
    summed,
    focal,
    balance,
    ranking,
    hard_triplets,
]


class Net(nn.Module):
    """Layers in which rows do not see each other.

    Args:
        change: what its forward does, given itself and its arguments.
        dropout: the share of values that it leaves out.
        seed: of its weights.
        held: its attributes; tensors that do not train are buffers.
    """

    def __init__(
        self,
        change: Callable[..., Any] | None = None,
        *,
        dropout: float = 0.0,
        seed: int = 0,
        **held: Any,
    ) -> None:
        super().__init__()
        self.change = change
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.body = nn.Sequential(
                nn.Linear(WIDTH, 16),
                nn.GELU(),
                nn.LayerNorm(16),
                nn.Dropout(dropout),
                nn.Linear(16, 16),
                nn.Tanh(),
                nn.Dropout(dropout),
            )
            self.head = nn.Linear(16, CLASSES)
        for name, value in held.items():
            is_buffer = type(value) is Tensor
            (self.register_buffer if is_buffer else self.__setattr__)(name, value)

    def plain(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.change is None:
            return self.plain(*args, **kwargs)
        return self.change(self, *args, **kwargs)


def batch(rows: int = ROWS, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Inputs and labels."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, CLASSES, (rows,), generator=generator)


def gradient(
    net: nn.Module, step: Callable[[Any], Tensor], seed: int = 3
) -> tuple[Tensor, Tensor]:
    """The loss of a step, and the gradient of all parameters."""
    net.zero_grad()
    torch.manual_seed(seed)
    loss = step(net)
    loss.backward()
    pairs = [(p, p.grad) for p in net.parameters()]
    found = [torch.zeros_like(p) if grad is None else grad for p, grad in pairs]
    return loss.detach(), torch.cat([each.flatten() for each in found])


def off_by(found: Tensor, wanted: Tensor) -> float:
    """How far a gradient is from another, as a share of its size."""
    return ((found - wanted).norm() / wanted.norm()).item()


def twin(net: nn.Module) -> Any:
    """A copy in float64."""
    return copy.deepcopy(net).double()


X, LABELS = batch()


def step(net: Any) -> Tensor:
    """A loss that looks across rows."""
    return nt_xent(net(X.to(next(net.parameters()))), LABELS)


def in_parts(net: Any, num: int = 6) -> Tensor:
    """The same loss of chunks that run in one graph."""
    parts = X.to(next(net.parameters())).tensor_split(num)
    return nt_xent(torch.cat([net(part) for part in parts]), LABELS)


def off(
    net: nn.Module,
    make: Callable[[Any], Tensor] = step,
    *,
    of: nn.Module | None = None,
    wanted: Tensor | None = None,
    times: int = 3,
    **cut: Any,
) -> float:
    """How far the gradient in chunks is from the whole batch's, at most.

    Args:
        net: which trains.
        make: its loss.
        of: the module in it that is cut; default: all.
        wanted: another gradient to compare with.
        times: how many steps are compared: some are looked at.
        cut: options of `Chunked`; default: chunks of 4 rows.
    """
    wanted = gradient(net, make)[1] if wanted is None else wanted
    with Chunked(net if of is None else of, **(cut or {"size": 4})):
        return max(off_by(gradient(net, make)[1], wanted) for _ in range(times))


def refused(net: nn.Module, words: str, *args: Any, **kwargs: Any) -> None:
    """A call in chunks of 4 rows, or of another size, raises an error with its name."""
    with Chunked(net, size=kwargs.pop("size", 4)):
        with pytest.raises(TrainkitError, match=f"(?s)Chunked.*{words}"):
            net(*(args or (X.to(next(net.parameters())),)), **kwargs)
