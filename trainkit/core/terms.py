"""Losses of several terms, each with a denominator of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainkit.core.division import Told
from trainkit.core.strategies import (
    AccumulationStrategy,
    LossReduction,
    Strategies,
    Weight,
    check_strategy,
)
from trainkit.core.totals import scalar
from trainkit.errors import TrainkitError

ONE = ""
"""The name of the term of a loss that has only one."""


def named_strategies(strategy: Any) -> dict[str, AccumulationStrategy]:
    """The strategy of each term; a single one is that of the term "".

    Raises:
        TrainkitError: something in it is no strategy, or no term is named.
    """
    if not isinstance(strategy, Mapping):
        check_strategy(strategy)
        return {ONE: strategy}
    for name, each in strategy.items():
        if not isinstance(name, str) or name == ONE:
            raise TrainkitError(
                f"strategy: the terms of a loss are named by text, received {name!r}. "
                f'Write {{"ce": PerToken(), "kl": PerSample()}}, say.'
            )
        check_strategy(each)
    if not strategy:
        raise TrainkitError(
            "strategy: a mapping must name the terms of the loss, and it is empty. "
            'Write {"ce": PerToken(), "kl": PerSample()}, say, or one strategy.'
        )
    return dict(strategy)


def leading(strategies: Strategies) -> AccumulationStrategy:
    """The first term's strategy, which measures the window as a whole."""
    if not strategies:
        raise TrainkitError(
            "strategy: the module has not said yet what a micro-batch weighs. Set "
            "self.accumulation before this is asked: in __init__(), say."
        )
    return next(iter(strategies.values()))


@dataclass(frozen=True)
class Joined:
    """The terms of a micro-batch, weighted, and what of them is reported.

    Attributes:
        loss: their sum; its backward pass multiplies each term's gradient by the
            factor of its own.
        weight: what the micro-batch weighs in the first term.
        value: its share of the window's loss, in the scale of a sum over the first
            term.
    """

    loss: Tensor
    weight: Weight
    value: Tensor


def join(
    terms: Mapping[str, Tensor],
    weights: Mapping[str, Weight],
    strategies: Strategies,
    told: Told,
) -> Joined:
    """Put a micro-batch's terms together; every rank does so in its first backward."""
    refuse_other_terms(terms, strategies)
    parts: list[Tensor] = []
    shares: list[Tensor] = []
    for name, term in terms.items():
        weight, reduction = weights[name], strategies[name].loss_reduction
        factor = told.factor_of_term(name, weight, reduction)
        # A node of its own: where the term is used elsewhere too (in another term,
        # say), what flows there is not this term's.
        part = term.reshape(()).clone()
        if part.requires_grad:
            part.register_hook(_multiply_by(factor))
        parts.append(part)
        shares.append(_share_of(part, name, weight, reduction, told))
    first = next(iter(strategies))
    total = scalar(told.totals[first], parts[0].device)
    return Joined(
        torch.stack(parts).sum(), weights[first], torch.stack(shares).sum() * total
    )


def _multiply_by(factor: Weight) -> Any:
    def multiplied(gradient: Tensor) -> Tensor:
        by = factor.to(gradient) if isinstance(factor, Tensor) else factor
        return gradient * by

    return multiplied


def _share_of(
    part: Tensor,
    name: str,
    weight: Weight,
    reduction: LossReduction,
    told: Told,
) -> Tensor:
    """A term's part of the window's mean; a mean over nothing is NaN, and is 0 here."""
    value = scalar(part, part.device)
    if reduction == "mean":
        value = torch.where(scalar(weight, value.device) == 0, 0, value)
    share = told.share(name, weight, reduction)
    return value * scalar(share, value.device)


def refuse_other_terms(terms: Mapping[str, Any], strategies: Strategies) -> None:
    if terms.keys() != strategies.keys():
        names, only = sorted(map(str, terms)), type(leading(strategies)).__name__
        have = f"there are strategies for {sorted(map(str, strategies))}"
        if ONE in strategies:
            have = f"there is one strategy, {only}, for one term"
        raise TrainkitError(
            f"loss: its terms are {names}, and {have}. Each term needs the one that "
            f'says its denominator, and each strategy its term: {{"ce": PerToken(), '
            f'"kl": PerSample()}}, say.'
        )
    for name, term in terms.items():
        if not isinstance(term, Tensor) or term.numel() != 1:
            shown = list(term.shape) if isinstance(term, Tensor) else repr(term)
            raise TrainkitError(
                f"loss term {name!r}: must be a tensor with one element, received "
                f"{shown}. Reduce it to what its strategy says: loss_reduction="
                f"{strategies[name].loss_reduction!r}."
            )


def untold_terms(strategies: Mapping[str, Any]) -> TrainkitError:
    return TrainkitError(
        f"loss: its terms {sorted(strategies)} have denominators of their own, so that "
        f"each must be divided by the total of its own over the window, which has to "
        f"be known before the first backward pass. Call expect() with all "
        f"micro-batches of the window before it; with Lightning set "
        f"self.micro_batching, and accumulate_grad_batches=1."
    )


def missing_terms(loss: Any, strategies: Mapping[str, Any]) -> TrainkitError:
    return TrainkitError(
        f"loss: there are strategies for the terms {sorted(strategies)}, received "
        f"{type(loss).__name__}. Pass a dict of these terms, or one strategy."
    )
