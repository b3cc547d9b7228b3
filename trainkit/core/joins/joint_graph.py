"""A BatchNorm layer in one graph over all micro-batches of a window.

Activations stay with their micro-batch. In the backward pass each one brings its two
sums; when all have, the gradients of all are completed together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainkit.core.batch_norm.layers import BatchNorm
from trainkit.core.joins.statistics import (
    Normal,
    Statistics,
    combined,
    num_entries,
    partial,
)
from trainkit.core.joins.transport import Kept, Transport
from trainkit.core.ranks import Ranks
from trainkit.errors import TrainkitError


@dataclass
class Meeting:
    """One call of a layer by all micro-batches.

    Attributes:
        name: of the layer, for messages.
        normal: normalises by the statistics of all.
        kept: what each micro-batch brought.
        partial: the gradient of each, which still lacks what the sums add.
        transport: holds both.
        ranks: that share the statistics.
        runs_once: whether there is one backward pass, so that nothing is kept after it.
    """

    name: str
    normal: Normal
    kept: list[Kept]
    transport: Transport
    ranks: Ranks
    runs_once: bool = False
    partial: dict[int, Kept] = field(default_factory=dict)

    def get(self, index: int) -> Tensor:
        """What a micro-batch brought."""
        if self.kept[index] is None:
            raise TrainkitError(
                f"{self.name}: a gradient has come to it by another way than the "
                f"outputs of its module, such as a tensor that a forward hook or an "
                f"attribute holds. Return that tensor as an output, detach() it, or "
                f"cut inside the step: MicroBatching(inside=...), or "
                f"exact_batch_norm(..., size=...)."
            )
        return self.transport.get(self.kept[index])

    def fetch(self, index: int) -> None:
        """Say that what a micro-batch brought is wanted next, if there is one."""
        if 0 <= index < len(self.kept):
            part = self.partial.get(index)
            also = [] if part is None else [part]
            self.transport.fetch([self.kept[index], *also])


def meet(
    layer: BatchNorm,
    name: str,
    brought: Sequence[Tensor],
    ranks: Ranks,
    transport: Transport,
    *,
    runs_once: bool = False,
) -> tuple[Statistics, list[tuple[Meeting, int, Tensor]]]:
    """The statistics of a layer's call, and what each micro-batch normalises with.

    Args:
        layer: which all micro-batches call.
        name: of it, for messages.
        brought: what each one calls it with.
        ranks: that share the statistics.
        transport: holds what the backward pass needs.
        runs_once: whether there is one backward pass.
    """
    entries = sum(map(num_entries, brought))
    statistics = combined([partial(x) for x in brought], entries, ranks, name)
    normal = Normal.of(layer, statistics)
    needs_graph = torch.is_grad_enabled() and (
        any(x.requires_grad for x in brought) or _trains(layer)
    )
    kept = [transport.put(x.detach()) for x in brought] if needs_graph else []
    meeting = Meeting(name, normal, kept, transport, ranks, runs_once)
    link = _Meet.apply(meeting, *brought)
    return statistics, [(meeting, index, link) for index in range(len(brought))]


def normalised(
    layer: BatchNorm, x: Tensor, meeting: Meeting, index: int, link: Tensor
) -> Tensor:
    """What a micro-batch gets from the layer.

    Args:
        layer: whose weights are used.
        x: what the micro-batch brought.
        meeting: of all.
        index: of the micro-batch.
        link: connects its backward pass with those of the others.
    """
    return _Normalise.apply(  # type: ignore[return-value]
        meeting, index, x.detach(), link, layer.weight, layer.bias
    )


def _trains(layer: BatchNorm) -> bool:
    both: Any = layer.weight, layer.bias
    return any(each is not None and each.requires_grad for each in both)


class _Meet(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, meeting: Meeting, *brought: Tensor) -> Tensor:
        ctx.meeting = meeting
        return torch.zeros_like(torch.stack([meeting.normal.weight] * 2))

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> Any:
        (sums,) = grad_outputs
        meeting: Meeting = ctx.meeting
        sums = meeting.ranks.sum_(sums.contiguous())
        found: list[Tensor | None] = []
        for index in range(len(meeting.kept)):
            part = meeting.partial.pop(index, None)
            x = meeting.get(index)
            meeting.fetch(index + 1)
            if meeting.runs_once:
                meeting.kept[index] = None
            gradient = meeting.normal.correction(x, sums)
            if part is not None:
                gradient += meeting.transport.get(part)
            found.append(gradient if ctx.needs_input_grad[index + 1] else None)
        return None, *found


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        meeting: Meeting,
        index: int,
        x: Tensor,
        link: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.meeting, ctx.index, ctx.like = meeting, index, (weight, bias)
        return meeting.normal(x)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> Any:
        (gradient,) = grad_outputs
        meeting: Meeting = ctx.meeting
        x = meeting.get(ctx.index)
        meeting.fetch(ctx.index - 1)
        part, *sums = meeting.normal.backward(gradient, x)
        if ctx.needs_input_grad[3]:
            meeting.partial[ctx.index] = meeting.transport.put(part)
        own = [
            None if like is None else each.to(like.dtype)
            for like, each in zip(ctx.like, sums, strict=True)
        ]
        return None, None, None, torch.stack(sums), *own


class Beginning(torch.autograd.Function):
    """Begins a graph at a leaf, with a tensor that may be changed in place."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return grad_outputs[0]
