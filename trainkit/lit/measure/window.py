"""The window of a few parts: their shares in it, and how far it is from the whole."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainkit.core.proof.gradients import size_of
from trainkit.core.proof.weights import Measured
from trainkit.core.strategies import AccumulationStrategy
from trainkit.errors import TrainkitError
from trainkit.lit.measure.terms import Pass


def terms_of(whole: Pass, parts: Sequence[Pass]) -> dict[str, Measured]:
    """The whole and its parts, for each backward call."""
    names = [term.name for term in whole.terms]
    for each in parts:
        if [term.name for term in each.terms] != names:
            raise TrainkitError(
                f"training_step: it goes backward {len(names)} times for all rows, and "
                f"{len(each.terms)} times for a part of them."
            )
    return {
        term.name: Measured(
            term.gradient,
            torch.stack([each.terms[number].gradient for each in parts]),
            term.loss,
            torch.tensor([each.terms[number].loss for each in parts]).double(),
        )
        for number, term in enumerate(whole.terms)
    }


def strategy_of(
    term: str, strategies: Mapping[str, AccumulationStrategy]
) -> AccumulationStrategy | None:
    """The strategy of a term; a module with one has it for all backward calls."""
    return strategies.get(term) or next(iter(strategies.values()), None)


def shares_of(
    term: str,
    strategy: AccumulationStrategy | None,
    parts: Sequence[Pass],
    batches: Iterable[Any],
) -> Tensor:
    """The share that each part has in the window.

    Args:
        term: of the loss.
        strategy: weighs it; None for plain accumulation.
        parts: the passes over them, in which `training_step` may say weights.
        batches: the parts.
    """
    ones = torch.ones(len(parts), dtype=torch.float64)
    if strategy is None:
        return ones / len(parts)
    if strategy.loss_reduction != "mean":
        return ones
    each = [_weight(term, strategy, *pair) for pair in zip(parts, batches, strict=True)]
    weights = torch.tensor(each, dtype=torch.float64)
    return weights / weights.sum()


def _weight(term: str, strategy: AccumulationStrategy, part: Pass, batch: Any) -> float:
    """What a part weighs: what `accumulate` was given, or else its batch."""
    found = next((each for each in part.terms if each.name == term), None)
    if found is not None and found.weight is not None:
        return found.weight
    given = None if found is None else found.batch
    return float(strategy.weight(batch if given is None else given))


def window_off_by(terms: Mapping[str, Measured], shares: Mapping[str, Tensor]) -> float:
    """How far the window is from the whole, over all terms."""
    sizes = {name: size_of(measured.whole) for name, measured in terms.items()}
    offs = [each.off_by(shares[name]) * sizes[name] for name, each in terms.items()]
    off = math.hypot(*offs) / math.hypot(*sizes.values())
    return math.inf if math.isnan(off) else off
