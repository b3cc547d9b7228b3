"""What `training_step` returned beside its loss, put together for a loader batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainkit.core.nested import with_tensors
from trainkit.core.strategies import Strategies, Weight
from trainkit.core.terms import terms_of
from trainkit.errors import TrainkitError
from trainkit.lit.split.micro_batches import CutBatch, weighted_mean


def taken_apart(
    output: Any, strategies: Strategies
) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """The loss of a micro-batch by its terms, of which a plain one is the only one; and
    what was returned beside it, without graphs."""
    extras = None
    if isinstance(output, Mapping):
        if output.get("loss") is None:
            held = {name: type(value).__name__ for name, value in output.items()}
            raise TrainkitError(
                f"training_step: a dict must hold the loss under 'loss', received "
                f"{held}. Return {{'loss': loss, ...}}; a loss of several terms is "
                f"{{'loss': {{'ce': ce, 'kl': kl}}}}."
            )
        beside = {name: value for name, value in output.items() if name != "loss"}
        output, extras = output["loss"], with_tensors(beside, Tensor.detach)
    return dict(terms_of(output, strategies, name="training_step's loss")), extras


def refuse_some_none(batch: CutBatch) -> None:
    """Refuse None for some of a loader batch's micro-batches, and a loss for others."""
    number = len(next(iter(batch.losses.values())))
    raise TrainkitError(
        f"training_step: it returned None for {batch.num_nothing} micro-batches of "
        f"a loader batch and a loss for {number}. Return a loss for "
        f"all, one that weighs nothing where nothing counts, such as "
        f"0.0 * output.sum(), or None for all."
    )


def put_together(batch: CutBatch) -> dict[str, Any]:
    """What was returned beside the losses of a loader batch's micro-batches.

    A value with one entry for each row is put into the loader batch's order. Single
    floating numbers become their mean, weighed as the loss is; a text, a bool or None
    that is equal in all stays. Anything else, such as an int, which may be a count of
    rows, or logits of micro-batches of unlike widths, becomes a list with the values of
    all micro-batches, in the order in which they ran.
    """
    extras = batch.extras
    if len(extras) == 1:
        return dict(extras[0])
    rows = [each.rows for each in batch.parts[: batch.num_counting]]
    weights = batch.leading[: len(rows)]
    names = dict.fromkeys(name for each in extras for name in each)
    return {
        name: _joined([each.get(name) for each in extras], rows, weights)
        for name in names
    }


def _joined(
    values: list[Any], rows: Sequence[Sequence[int]], weights: Sequence[Weight]
) -> Any:
    order = [row for each in rows for row in each]
    places = sorted(range(len(order)), key=order.__getitem__)
    lengths = [len(each) for each in rows]
    if all(isinstance(each, list) for each in values):
        flat = [entry for value in values for entry in value]
        is_by_row = lengths == [len(each) for each in values]
        return [flat[place] for place in places] if is_by_row else values
    if all(isinstance(each, float) for each in values):
        wide = [torch.tensor(each, dtype=torch.float64) for each in values]
        return float(weighted_mean(wide, weights))
    if all(each is None or isinstance(each, str | bool) for each in values):
        return values[0] if len(set(values)) == 1 else values
    if not all(isinstance(each, Tensor) for each in values):
        return values
    if all(each.ndim == 0 and each.is_floating_point() for each in values):
        return weighted_mean(values, weights)
    by_row = [(length, *values[0].shape[1:]) for length in lengths]
    if not values[0].ndim or by_row != [tuple(each.shape) for each in values]:
        return values
    whole = torch.cat(values)
    if places == list(range(len(places))):
        return whole
    index = torch.tensor(places, pin_memory=whole.is_cuda)
    return whole[index.to(whole.device, non_blocking=True)]
