"""What a split window cannot be is refused by name, at the latest in the first one."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from trainkit.core.batches import describe
from trainkit.core.expected import Strategies
from trainkit.core.ranks import Ranks
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.strategies import Uniform
from trainkit.errors import TrainkitError

if TYPE_CHECKING:
    from trainkit.lit.split.parts import Part


def refuse_before_training(
    trainer: Any, pl_module: Any, options: Any, strategies: Strategies
) -> None:
    """What can be known before the first batch."""
    name = type(pl_module).__name__
    if not isinstance(options, MicroBatching):
        raise TrainkitError(
            f"{name}.micro_batching: must be a MicroBatching, received {options!r}. "
            f"Write MicroBatching(size=4), MicroBatching(tokens=4096) or "
            f'MicroBatching("auto").'
        )
    if not pl_module.automatic_optimization:
        raise TrainkitError(
            f"{name}.micro_batching: with automatic_optimization=False the module runs "
            f"its own backward passes, inside training_step, where no batch can be "
            f"cut. Leave micro_batching out and call self.accumulate() for each "
            f"micro-batch, or leave the optimization to Lightning."
        )
    if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
        raise TrainkitError(
            f"{name}.training_step(dataloader_iter): it fetches its batches itself, so "
            f"none can be cut. Take (batch, batch_idx), or leave micro_batching out."
        )
    uniform = [term for term, each in strategies.items() if isinstance(each, Uniform)]
    if uniform:
        raise TrainkitError(
            f"{name}.accumulation: Uniform() counts micro-batches, and with "
            f"micro_batching their number is a matter of speed, not of the gradient. "
            f"Say what training_step's mean is over: PerSample() or PerToken()."
        )
    if len(strategies) > 1 and trainer.accumulate_grad_batches != 1:
        raise TrainkitError(
            f"{name}.accumulation: the terms {sorted(strategies)} have denominators of "
            f"their own, whose totals must be known before the first backward pass, "
            f"and with accumulate_grad_batches={trainer.accumulate_grad_batches} the "
            f"window's next batches are not there yet. Set it to 1 and let the loader "
            f"yield the whole batch: micro_batching cuts it."
        )


def refuse_untold_terms(pl_module: Any, strategies: Strategies) -> None:
    """Several terms in a streamed window."""
    if len(strategies) > 1:
        raise TrainkitError(
            f"{type(pl_module).__name__}.accumulation: the terms {sorted(strategies)} "
            f"have denominators of their own, each of which must be known before the "
            f"first backward pass, and a window of several loader batches tells them "
            f"only at its end. Let one loader batch be the window: "
            f"self.micro_batching = MicroBatching(size=4), say."
        )


def refuse_auto_between_ranks(trainer: Any, communicates: bool) -> None:
    if communicates:
        raise TrainkitError(
            f'MicroBatching("auto"): under {type(trainer.strategy).__name__} forward '
            f"passes communicate, and a rank whose memory runs out inside one leaves "
            f"the others waiting, so a size cannot be tried. Say it: "
            f"MicroBatching(size=4) or MicroBatching(tokens=4096)."
        )


def communicates_in_forward(pl_module: Any, ranks: Ranks) -> bool:
    """Whether forward passes wait for other ranks, which then must run as many."""
    if ranks.size == 1:
        return False
    kinds = (nn.SyncBatchNorm, FullyShardedDataParallel)
    return any(isinstance(m, kinds) for m in pl_module.modules()) or any(
        isinstance(p, DTensor) for p in pl_module.parameters()
    )


def verify_cut(whole: Any, parts: Sequence[Part], strategies: Strategies) -> None:
    """In the first window: are the parts what was to be cut, and weigh they as much?"""
    rows = sorted(row for part in parts for row in part.micro_batch.rows)
    if rows != list(range(len(rows))):
        raise TrainkitError(
            f"MicroBatching: the micro-batches hold the rows {rows}, and each row must "
            f"be in exactly one. The batch is {describe(whole)}."
        )
    if whole is None:  # a list of samples, which nobody can weigh before collating
        return
    for term, strategy in strategies.items():
        in_parts = sum(float(part.weights[term]) for part in parts)
        in_all = float(strategy.weight(whole))
        if not math.isclose(in_parts, in_all, rel_tol=1e-6, abs_tol=1e-9):
            raise TrainkitError(
                f"{type(strategy).__name__}: what micro-batches weigh must add up to "
                f"what their batch weighs, and {len(parts)} of them weigh {in_parts:g} "
                f"together, the batch {in_all:g}. The batch is {describe(whole)}. Let "
                f"weight() return a sum over rows."
            )


def refuse_output(loss: Any) -> None:
    terms = list(loss.values()) if isinstance(loss, Mapping) else [loss]
    for term in terms:
        if not isinstance(term, Tensor) or term.numel() != 1:
            shown = list(term.shape) if isinstance(term, Tensor) else repr(term)
            raise TrainkitError(
                f"training_step: the loss, or each of its terms, must be a tensor with "
                f"one element, received {shown}. Reduce it to what the strategy says."
            )


def announce_too_long(longest: int) -> None:
    warnings.warn(
        f"MicroBatching: a sample of {longest} tokens alone exceeds the budget, and a "
        f"sample cannot be cut, so it makes a micro-batch of its own. The step is "
        f"exact; if memory does not suffice, shorten such samples.",
        stacklevel=2,
    )
