"""Losses of several terms, each divided by its own total."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainkit.core.division import Told
from trainkit.core.strategies import (
    AccumulationStrategy,
    PerToken,
    Strategies,
    Weight,
    check_strategy,
)
from trainkit.core.window import quotient, scalar
from trainkit.errors import TrainkitError

ONE = ""
"""The name of the only term of a loss."""


def named_strategies(strategy: Any) -> dict[str, AccumulationStrategy]:
    """The strategies by the names of their terms; a single strategy's term is "".

    Raises:
        TrainkitError: a value is not a strategy, or a name is not a text.
    """
    if not isinstance(strategy, Mapping):
        check_strategy(strategy)
        return {ONE: strategy}
    for name, each in strategy.items():
        if not isinstance(name, str) or name == ONE:
            raise TrainkitError(
                f"strategy: the terms of a loss must be named by text, received "
                f'{name!r}. For example {{"ce": PerToken(), "kl": PerSample()}}.'
            )
        check_strategy(each)
    if not strategy:
        raise TrainkitError(
            "strategy: a mapping must name the terms of the loss, and it is empty. "
            'Pass {"ce": PerToken(), "kl": PerSample()}, for example, or one strategy.'
        )
    return dict(strategy)


def leading(strategies: Strategies) -> AccumulationStrategy:
    """The first term's strategy, which measures the window as a whole."""
    if not strategies:
        raise TrainkitError(
            "strategy: the module has no strategy yet, so nothing shows what a "
            "micro-batch weighs. Set self.accumulation earlier, in __init__() for "
            "example."
        )
    return next(iter(strategies.values()))


def telling_lengths(strategies: Strategies) -> AccumulationStrategy:
    """The one whose labels tell how long rows are: the first `PerToken`, if any."""
    tokens = (each for each in strategies.values() if isinstance(each, PerToken))
    return next(tokens, leading(strategies))


class Joined(NamedTuple):
    """The terms of a micro-batch, joined into one loss."""

    loss: Tensor
    """Their sum; its backward pass multiplies each term's gradient by its factor."""
    weight: Weight
    """What the micro-batch weighs in the first term."""
    value: Tensor
    """Its share of the window's loss, times the window's total in the first term."""


def join(
    loss: Any, told: Told | None, strategies: Strategies, multiplier: int
) -> Joined:
    """Join the terms of the next announced micro-batch, each divided by its own total.

    Every rank must do so in its first backward pass.

    Args:
        loss: the terms by name.
        told: what the window's micro-batches weigh.
        strategies: one for each term.
        multiplier: undoes the backend's mean over ranks.
    """
    if told is None:
        raise TrainkitError(
            f"loss: each of its terms {sorted(strategies)} must be divided by its own "
            f"total over the window, which has to be known before the first backward "
            f"pass. Call expect() with all micro-batches of the window before it. With "
            f"Lightning set self.micro_batching, and accumulate_grad_batches=1."
        )
    weights = told.next_weights()
    terms = terms_of(loss, strategies)
    parts, shares = [], []
    for name, term in terms.items():
        weight, reduction = weights[name], strategies[name].loss_reduction
        share: Weight = 1.0
        if reduction != "total":
            share = quotient(weight if reduction == "mean" else 1, told.totals[name])
        # A node of its own: the term may be used elsewhere too (in another term, for
        # example), and gradients from there are not this term's.
        part = term.reshape(()).clone()
        if part.requires_grad:
            part.register_hook(_multiply_by(share * multiplier))
        parts.append(part)
        value = scalar(part, part.device)
        if reduction == "mean":  # a mean over nothing is NaN, and is 0 here
            value = torch.where(scalar(weight, value.device) == 0, 0, value)
        shares.append(value * scalar(share, value.device))
    total = scalar(told.totals[told.leading], parts[0].device)
    value = torch.stack(shares).sum() * total
    return Joined(torch.stack(parts).sum(), weights[told.leading], value)


def _multiply_by(factor: Weight) -> Any:
    def multiplied(gradient: Tensor) -> Tensor:
        by = factor.to(gradient) if isinstance(factor, Tensor) else factor
        return gradient * by

    return multiplied


def terms_of(
    loss: Any, strategies: Strategies, *, name: str = "loss"
) -> Mapping[str, Tensor]:
    """A micro-batch's loss by its terms; a plain one is the only term.

    Args:
        loss: what was computed.
        strategies: one for each term.
        name: what an error calls the loss.
    """
    terms = loss if isinstance(loss, Mapping) else {next(iter(strategies)): loss}
    if terms.keys() != strategies.keys():
        received = [*loss] if terms is loss else type(loss).__name__
        wanted = f"a dict of the terms {sorted(strategies)}, as there are strategies"
        if ONE in strategies:
            wanted = f"one tensor, as there is one strategy, {leading(strategies)!r}"
        raise TrainkitError(
            f"{name}: must be {wanted}, received {received}. Each term needs a "
            f'strategy, for example {{"ce": PerToken(), "kl": PerSample()}}.'
        )
    for term, value in terms.items():
        own = f"{name} term {term!r}" if terms is loss else name
        refuse_shape(own, value, strategies[term].loss_reduction)
    return terms


def refuse_shape(name: str, loss: Any, reduction: str) -> None:
    """Refuse a loss that is not a tensor with one element."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shown = list(loss.shape) if isinstance(loss, Tensor) else repr(loss)
        raise TrainkitError(
            f"{name}: must be a tensor with one element, received {shown}. Reduce it "
            f"as the strategy expects: loss_reduction={reduction!r}."
        )
