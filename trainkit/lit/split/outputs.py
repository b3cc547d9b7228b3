"""What `training_step` returned for micro-batches, put together for a loader batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainkit.core.nested import with_tensors
from trainkit.core.strategies import Strategies, Weight
from trainkit.core.terms import terms_of
from trainkit.core.window import vector
from trainkit.errors import TrainkitError
from trainkit.lit.split.micro_batches import CutBatch


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
    terms = terms_of(output, strategies, name="training_step's loss")
    return dict(terms), extras


def value_of(loss: Tensor) -> Tensor:
    """A loss to report; on a GPU the next step of a CUDA graph overwrites it."""
    value = loss.detach()
    return value.clone() if value.is_cuda else value


def as_one(batch: CutBatch, strategies: Strategies) -> Any:
    """What `training_step` would have returned for the whole loader batch.

    None if it returned None for all micro-batches. Of what it returns beside the loss,
    a value with one entry for each row is put into the loader batch's order. Single
    floating numbers become their mean, weighed as the loss is; a text, a bool or None
    that is equal in all stays. Anything else, such as an int, which may be a count of
    rows, or logits of micro-batches of unlike widths, becomes a list with the values of
    all micro-batches, in the order in which they ran.

    Args:
        batch: the loader batch, of which all micro-batches have run.
        strategies: weigh the terms of the loss.
    """
    if not batch.extras:
        return None
    if batch.num_nothing:
        raise TrainkitError(
            f"training_step: it returned None for {batch.num_nothing} micro-batches of "
            f"a loader batch and a loss for {len(batch.extras)}. Return a loss for "
            f"all, one that weighs nothing where nothing counts, such as "
            f"0.0 * output.sum(), or None for all."
        )
    terms = []
    for name, losses in batch.terms.items():
        if strategies[name].loss_reduction != "mean":
            terms.append(torch.stack(losses).sum())
        elif len(losses) == 1:
            terms += losses
        else:
            terms.append(weighted_mean(losses, batch.weights[name][: len(losses)]))
    loss = terms[0] if len(terms) == 1 else torch.stack(terms).sum()
    extras = [each for each in batch.extras if each is not None]
    if not extras:
        return loss
    rows = [each.rows for each in batch.parts[: batch.num_counting]]
    return {"loss": loss, **put_together(extras, rows, batch.leading[: len(rows)])}


def put_together(
    extras: Sequence[Mapping[str, Any]],
    rows: Sequence[Sequence[int]],
    weights: Sequence[Weight],
) -> dict[str, Any]:
    """The extras of a window's micro-batches as those of one batch, as `as_one` says.

    Args:
        extras: what each micro-batch returned.
        rows: its rows of the loader batch.
        weights: its weight.
    """
    if len(extras) == 1:
        return dict(extras[0])
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


def weighted_mean(values: Sequence[Any], weights: Sequence[Weight]) -> Tensor:
    """The mean of numbers and 0-d tensors, in the dtype of the first; one that weighs
    nothing may be NaN. If all weigh nothing, they count alike."""
    device, dtype = like(values)
    if device.type == "cpu" and not any([isinstance(w, Tensor) for w in weights]):
        # Plain numbers: one tensor operation costs more than all of this.
        weights = weights if sum(weights) else [1] * len(values)
        pairs = zip(weights, values, strict=True)
        mean = sum([w * float(value) for w, value in pairs if w]) / sum(weights)
        return torch.tensor(mean, dtype=dtype)
    numbers, by = vector(values, device), vector(weights, device)
    total = by.sum()
    mean = numbers.where(by != 0, 0.0).dot(by) / total  # NaN * 0 is NaN
    return torch.where(total == 0, numbers.mean(), mean).to(dtype)


def like(values: Sequence[Any]) -> tuple[torch.device, torch.dtype]:
    """The device and the floating dtype for what is computed of several values."""
    default = torch.get_default_dtype()
    for each in values:
        if isinstance(each, Tensor):
            return each.device, each.dtype if each.is_floating_point() else default
    return torch.device("cpu"), default
