"""The outputs of `training_step` beside the loss, combined from its micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from trainkit.core.nested import with_tensors
from trainkit.core.strategies import AccumulationStrategy, Strategies, Weight
from trainkit.core.window import are_numbers, vector, weighted_sum
from trainkit.errors import TrainkitError
from trainkit.lit.split.micro_batches import WeighedMicroBatch


class Returned:
    """The outputs of a loader batch's micro-batches so far."""

    def __init__(self) -> None:
        self._losses: dict[str, list[Tensor]] = {}
        self._extras: list[dict[str, Any]] = []
        self._num_nothing = 0
        self._is_dict = False

    @property
    def is_nothing(self) -> bool:
        """Whether all of them returned None."""
        return not self._extras

    def add_nothing(self) -> None:
        self._num_nothing += 1

    def add(
        self, output: Any, terms: Mapping[str, Tensor], extras: dict[str, Any]
    ) -> None:
        self._is_dict = self._is_dict or isinstance(output, Mapping)
        self._extras.append(extras)
        for name, term in terms.items():
            value = term.detach()
            self._losses.setdefault(name, []).append(
                value.reshape(()) if value.ndim else value
            )

    def refuse_some_nothing(self) -> None:
        if self._extras and self._num_nothing:
            raise TrainkitError(
                f"training_step: it returned None for {self._num_nothing} "
                f"micro-batches of a loader batch and a loss for "
                f"{len(self._extras)}. Return a loss for all, one that weighs nothing "
                f"where nothing counts, such as 0.0 * output.sum(), or None for all."
            )

    def as_one(
        self, strategies: Strategies, micro_batches: Sequence[WeighedMicroBatch]
    ) -> Any:
        """The output that `training_step` would have returned for the whole batch."""
        counting = [each for each in micro_batches if not each.is_filler]
        first = next(iter(strategies))
        weights = {t: [each.weights[t] for each in counting] for t in strategies}
        terms = [
            _whole_loss(losses, weights[name], strategies[name])
            for name, losses in self._losses.items()
        ]
        loss = terms[0] if len(terms) == 1 else torch.stack(terms).sum()
        if not self._is_dict:
            return loss
        rows = [each.cut.rows for each in counting]
        extras = put_together(self._extras, rows, weights[first])
        return {"loss": loss, **extras}


def _whole_loss(
    losses: Sequence[Tensor],
    weights: Sequence[Weight],
    strategy: AccumulationStrategy,
) -> Tensor:
    if strategy.loss_reduction != "mean":
        return torch.stack(list(losses)).sum()
    return losses[0] if len(losses) == 1 else weighted_mean(losses, weights)


def taken_apart(output: Any) -> tuple[Any, dict[str, Any]]:
    """The loss (or its terms) of a micro-batch, and the rest, without graphs."""
    if not isinstance(output, Mapping):
        return output, {}
    if output.get("loss") is None:
        held = {name: type(value).__name__ for name, value in output.items()}
        raise TrainkitError(
            f"training_step: a dict must hold the loss under 'loss', received {held}. "
            f"Return {{'loss': loss, ...}}; a loss of several terms is "
            f"{{'loss': {{'ce': ce, 'kl': kl}}}}."
        )
    extras = {name: value for name, value in output.items() if name != "loss"}
    return output["loss"], with_tensors(extras, Tensor.detach)


def put_together(
    extras: Sequence[Mapping[str, Any]],
    rows: Sequence[Sequence[int]],
    weights: Sequence[Weight],
) -> dict[str, Any]:
    """The extras of a window's micro-batches as those of one batch.

    A value with one entry for each row is put into the loader batch's order. Single
    floating numbers become their mean, weighed as the loss is. Anything else, such as
    logits of micro-batches of unlike widths, becomes a list with the values of all
    micro-batches, in the order in which they ran.

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
    values: list[Any],
    rows: Sequence[Sequence[int]],
    weights: Sequence[Weight],
) -> Any:
    order = [row for each in rows for row in each]
    if _are_rows(values, rows):
        whole = torch.cat(values)
        back = torch.empty(len(order), dtype=torch.long)
        back[torch.tensor(order)] = torch.arange(len(order))
        return whole[back.to(whole.device)]
    if all(
        isinstance(value, list) and len(value) == len(own)
        for value, own in zip(values, rows, strict=True)
    ):
        flat = [entry for value in values for entry in value]
        return [
            entry
            for _, entry in sorted(zip(order, flat, strict=True), key=itemgetter(0))
        ]
    if all(isinstance(v, Tensor) and v.ndim == 0 for v in values):
        if all(v.is_floating_point() for v in values):
            return weighted_mean(values, weights)
    return values


def weighted_mean(values: Sequence[Tensor], weights: Sequence[Weight]) -> Tensor:
    """The mean of 0-d tensors; one that weighs nothing may be NaN."""
    if values[0].is_cpu and are_numbers(weights):
        return values[0].new_tensor(_mean_of_numbers(values, weights))
    numbers = vector(values, values[0].device)
    by = vector(weights, values[0].device)
    mean = weighted_sum(numbers, weights) / by.sum()
    return torch.where(by.sum() == 0, numbers.mean(), mean).to(values[0].dtype)


def _mean_of_numbers(values: Sequence[Tensor], weights: Sequence[Any]) -> float:
    """The mean by plain numbers: one tensor operation costs more than all of them."""
    pairs = [(w, value.item()) for w, value in zip(weights, values, strict=True)]
    total = sum(weights)
    if not total:
        return sum(value for _, value in pairs) / len(pairs)
    return sum(w * value for w, value in pairs if w) / total


def _are_rows(values: list[Any], rows: Sequence[Sequence[int]]) -> bool:
    """Whether they are tensors with an entry for each row, of one shape."""
    return all(
        isinstance(value, Tensor)
        and value.ndim > 0
        and value.shape[0] == len(own)
        and value.shape[1:] == values[0].shape[1:]
        for value, own in zip(values, rows, strict=True)
    )
