"""Head and cross entropy in chunks of tokens, so that logits never exist whole."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from trainkit.core.inside.cut import strangers_of
from trainkit.core.plan.options import check_choice, check_kind, check_whole_number
from trainkit.errors import TrainkitError

Reduction = Literal["mean", "sum"]


class TokenLoss(nn.Module):
    """The cross entropy of what a head makes of hidden states, in chunks of tokens.

    The gradients of a chunk are made in the forward pass, right after its loss, so that
    the logits of one chunk exist at a time, and no second pass is needed. Loss and
    gradients are those of `cross_entropy(head(hidden), labels)`.

    >>> head = nn.Linear(4, 7)
    >>> hidden, labels = torch.randn(2, 5, 4), torch.randint(7, (2, 5))
    >>> loss = TokenLoss(head, size=3)(hidden, labels)
    >>> whole = F.cross_entropy(head(hidden).flatten(0, 1), labels.flatten())
    >>> torch.allclose(loss, whole)
    True

    Args:
        head: makes logits of hidden states, each token by itself, such as a model's
            `lm_head`. Its weights may be tied, or frozen beneath LoRA.
        size: the most tokens in a chunk.
        ignore_index: the label that does not count.
        label_smoothing: as in `cross_entropy`.
        reduction: `"mean"` over the labels that count (0 if none does), or `"sum"`.
    """

    def __init__(
        self,
        head: nn.Module,
        *,
        size: int = 1024,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__()
        check_whole_number("TokenLoss size", size)
        check_kind("TokenLoss ignore_index", ignore_index, int, "a whole number")
        numbers = int, float
        check_kind("TokenLoss label_smoothing", label_smoothing, numbers, "a number")
        if not isinstance(head, nn.Module):
            raise TrainkitError(
                f"TokenLoss head: must be a module that makes logits of hidden states, "
                f"received {type(head).__name__}. For a bare weight, take a Linear "
                f"layer that shares it."
            )
        check_choice("TokenLoss reduction", reduction, get_args(Reduction))
        if not 0 <= label_smoothing <= 1:
            raise TrainkitError(
                f"TokenLoss label_smoothing: must be a share from 0 to 1, received "
                f"{label_smoothing!r}. 0 leaves it out."
            )
        self.head = head
        self.size = size
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.reduction = reduction

    def forward(self, hidden: Tensor, labels: Tensor, *, shift: bool = False) -> Tensor:
        """The loss.

        Args:
            hidden: the states of all tokens, in the last dimension.
            labels: one for each of them.
            shift: whether each state predicts the label of the next token in its row.
        """
        if hidden.shape[:-1] != labels.shape:
            raise TrainkitError(
                f"TokenLoss labels: must be one for each hidden state, received labels "
                f"of shape {list(labels.shape)} for states of {list(hidden.shape)}."
            )
        if shift:
            hidden, labels = hidden[..., :-1, :], labels[..., 1:]
        hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
        weights = dict(self.head.named_parameters())
        if not torch.is_grad_enabled():
            weights, hidden = {}, hidden.detach()
        trained = {name: each for name, each in weights.items() if each.requires_grad}
        total = _InChunks.apply(self, [*trained], labels, hidden, *trained.values())
        if self.reduction == "sum":
            return total
        # 0 / 0 in the backward pass would make NaN of the window's whole gradient.
        return total / (labels != self.ignore_index).sum().clamp(min=1)

    def of_chunk(self, states: Tensor, labels: Tensor, weights: Any) -> Tensor:
        """The summed loss of one chunk, with these weights of the head."""
        logits = functional_call(self.head, weights, (states,))
        return F.cross_entropy(
            logits,
            labels,
            reduction="sum",
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
        )


class _InChunks(torch.autograd.Function):
    """The sum of a `TokenLoss` over all tokens, whose gradients are made with it."""

    @staticmethod
    def forward(
        ctx: Any, loss: TokenLoss, names: list[str], labels: Tensor, *inputs: Tensor
    ) -> Tensor:
        hidden, *weights = inputs
        own = [each.detach().requires_grad_() for each in weights]
        has_grad, needs_hidden = any(ctx.needs_input_grad), ctx.needs_input_grad[3]
        sums = [torch.zeros_like(each, dtype=_wide(each)) for each in weights]
        of_hidden = torch.empty_like(hidden) if needs_hidden else None
        total = torch.zeros((), dtype=_wide(hidden), device=hidden.device)
        for start in range(0, len(hidden), loss.size):
            rows = slice(start, start + loss.size)
            states = hidden[rows].detach().requires_grad_(needs_hidden)
            with torch.set_grad_enabled(has_grad):
                given = dict(zip(names, own, strict=True))
                found = loss.of_chunk(states, labels[rows], given)
            total += found.detach()
            if not has_grad:
                continue
            if not start:
                strangers_of([found], [states, *own], "TokenLoss head")
            sought = [states] * needs_hidden + own
            parts = list(torch.autograd.grad(found, sought, allow_unused=True))
            if of_hidden is not None:
                of_hidden[rows] = parts.pop(0)
            for held, part in zip(sums, parts, strict=True):
                if part is not None:
                    held += part
        ctx.save_for_backward(of_hidden, *sums)
        ctx.types = [each.dtype for each in inputs]
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        if torch.is_grad_enabled():
            raise TrainkitError(
                "TokenLoss: its gradients have no gradients of their own, received a "
                "backward pass with create_graph=True. Call cross_entropy on "
                "head(hidden) for second derivatives."
            )
        pairs = zip(ctx.saved_tensors, ctx.types, strict=True)
        made = [None if x is None else (x * gradient).to(dtype) for x, dtype in pairs]
        return None, None, None, *made


def _wide(tensor: Tensor) -> torch.dtype:
    """The type in which chunks are added up: no half precision."""
    return torch.promote_types(tensor.dtype, torch.float32)
