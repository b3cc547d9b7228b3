"""The strategy for a cross entropy with class weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trainkit.core.nested import Path
from trainkit.core.strategies import (
    AccumulationStrategy,
    LossReduction,
    PerToken,
    Weight,
    check_reduction,
)
from trainkit.errors import TrainkitError


class PerClassWeight(AccumulationStrategy):
    """The weight of a micro-batch is the sum of its labels' class weights.

    This is what `cross_entropy(weight=...)` divides by, where it takes a mean.

    >>> import torch
    >>> strategy = PerClassWeight(weight=[1.0, 3.0])
    >>> strategy.weight({"labels": torch.tensor([0, 1, 1, -100])})
    tensor(7., dtype=torch.float64)

    Args:
        weight: one number for each class: what the loss function gets. A tensor is read
            with each micro-batch, so it may change in place. Give a function that
            returns it, such as `lambda: self.rates`, where another tensor takes its
            place: one that is assigned, or a buffer that moves to a GPU.
        labels: dotted path or index of the labels in the batch.
        ignore_index: the label that does not count, as in `cross_entropy`.
        loss_reduction: what `training_step` returns: `"mean"`; `"sum"`, which is
            divided by the window's weight; or `"total"`, a sum that stays a sum.
    """

    def __init__(
        self,
        *,
        weight: Sequence[float] | Tensor | Callable[[], Tensor],
        labels: Path = "labels",
        ignore_index: int = -100,
        loss_reduction: LossReduction = "mean",
    ) -> None:
        if not isinstance(weight, Tensor) and not callable(weight):
            weight = torch.tensor(_checked_numbers(weight), dtype=torch.float64)
        self._given = weight
        _checked_numbers(self.class_weights)
        # It counts and checks the labels.
        self._labels = PerToken(labels=labels, ignore_index=ignore_index)
        self.labels, self.ignore_index = labels, ignore_index
        self.loss_reduction = loss_reduction
        check_reduction(self)

    @property
    def class_weights(self) -> tuple[float, ...]:
        """The numbers at present; waits for the device."""
        return tuple(self._now().tolist())

    def _now(self) -> Tensor:
        return self._given() if callable(self._given) else self._given

    def weight(self, batch: Any) -> Weight:
        labels = self._labels.found(batch)
        counts = labels != self.ignore_index
        given = self._now().detach()
        dtype = torch.float32 if labels.is_mps else torch.float64
        # On the way to a device nothing waits; back from one, it would come too late.
        weights = given.to(labels.device, dtype, non_blocking=given.is_cpu)
        try:
            # index_select, by which -1 is no label.
            found = weights.index_select(0, torch.where(counts, labels, 0).flatten())
            return (found * counts.flatten()).sum()
        except IndexError:
            raise TrainkitError(
                f"PerClassWeight labels {self.labels!r}: must be classes from 0 to "
                f"{len(weights) - 1}, one for each weight, or {self.ignore_index}, "
                f"received {int(labels[counts].min())} to {int(labels[counts].max())}. "
                f"Give a weight for each class, or name what is ignored: ignore_index=."
            ) from None

    def __repr__(self) -> str:
        return (
            f"PerClassWeight(weight={list(self.class_weights)}, "
            f"labels={self.labels!r}, ignore_index={self.ignore_index}, "
            f"loss_reduction={self.loss_reduction!r})"
        )


def _checked_numbers(values: Any) -> tuple[float, ...]:
    try:
        found = tuple(float(value) for value in values)
    except (TypeError, ValueError):
        found = ()
    if not found or not all(math.isfinite(each) and each >= 0 for each in found):
        raise TrainkitError(
            f"PerClassWeight weight: must be one finite number of at least 0 for each "
            f"class, received {values!r}. Give what cross_entropy(weight=...) gets."
        )
    return found
