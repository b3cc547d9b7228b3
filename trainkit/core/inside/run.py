"""A call in chunks as autograd sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainkit.core.inside.call import Call


class Run(torch.autograd.Function):
    """A call as autograd sees it: one node, whose inputs are all that trains."""

    @staticmethod
    def forward(ctx: Any, call: Call, *trained: Tensor) -> tuple[Tensor, ...]:
        assert call.values is not None
        leaves = call.forward(has_graph=True)
        # Saved, they raise as usual if they are changed before the backward pass.
        ctx.at = [i for i, v in enumerate(call.values) if isinstance(v, Tensor)]
        ctx.save_for_backward(*[call.values[i] for i in ctx.at])
        ctx.others = [None if isinstance(v, Tensor) else v for v in call.values]
        ctx.call, call.values = call, None
        ctx.set_materialize_grads(False)
        call.leaves = leaves
        tensors = {i: v for i, v in enumerate(leaves) if isinstance(v, Tensor)}
        ctx.outputs = list(tensors)
        plain = [v for i, v in tensors.items() if not call.differentiable[i]]
        ctx.mark_non_differentiable(*plain)
        return tuple(tensors.values())

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        values = list(ctx.others)
        for place, value in zip(ctx.at, ctx.saved_tensors, strict=True):
            values[place] = value
        gradients: list[Tensor | None] = [None] * len(ctx.call.differentiable)
        for place, gradient in zip(ctx.outputs, given, strict=True):
            gradients[place] = gradient
        return (None, *ctx.call.backward(values, gradients))


def run_in_chunks(
    call: Call, restore: Callable[[list[Any]], list[Any]] = lambda leaves: leaves
) -> Any:
    """The output of a call, whose rows run in chunks.

    Args:
        call: which has not run.
        restore: what is done to the leaves of its output.
    """
    assert call.values is not None
    if not (torch.is_grad_enabled() and call.trains):
        leaves = call.forward(has_graph=torch.is_grad_enabled())
    else:
        trained = [*call.moment.parameters, *[call.values[i] for i in call.trained]]
        outputs = iter(Run.apply(call, *trained))  # type: ignore[arg-type]
        leaves = [next(outputs) if isinstance(v, Tensor) else v for v in call.leaves]
        call.leaves = []
    assert call.build is not None
    return call.build(iter(restore(leaves)))
