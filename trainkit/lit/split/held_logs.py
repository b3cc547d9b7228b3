"""The logs of `training_step`, held until the window is complete."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Number
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from trainkit.core.strategies import AccumulationStrategy, Strategies, Weight
from trainkit.core.window import vector
from trainkit.errors import TrainkitError
from trainkit.lit._compat import as_hook, current_hook
from trainkit.lit.split.window_metrics import WindowMetrics

OPTIONS = tuple(inspect.signature(LightningModule.log).parameters)[3:]
"""The parameters of Lightning's `log` after the name and the value."""

LogWeight = Weight | str | AccumulationStrategy


@dataclass
class _Held:
    """The values of one name, as it was logged in the micro-batches so far.

    Attributes:
        is_sum: whether it is a loss that is a sum over rows.
    """

    values: list[Any] = field(default_factory=list)
    weights: list[Weight] = field(default_factory=list)
    batch_sizes: list[int] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    is_sum: bool = False


class HeldLogs:
    """Combines the values of a window's micro-batches into those of one batch.

    Means are weighed as the loss is, by the strategy, or by `weight=`. Sums are added
    up, and of several extremes the extreme is taken. A metric object is logged once.

    Args:
        metrics: says what a metric object shows.
    """

    of_micro_batch = (
        "_batch",
        "_weights",
        "_is_muted",
        "_recent",
        "_num_calls",
        "_weighed_later",
    )

    def __init__(self, metrics: WindowMetrics) -> None:
        self._metrics = metrics
        self._held: dict[tuple[str, str, int], _Held] = {}
        self._num_calls: Counter[tuple[str, str]] = Counter()
        self._weights: Mapping[str, Weight] = {}
        self._batch: Any = None
        self._is_muted = False
        self._recent: list[tuple[_Held, int, Tensor]] = []
        self._weighed_later: list[tuple[_Held, int, str]] = []

    def begin(
        self, batch: Any, weights: Mapping[str, Weight], *, is_muted: bool
    ) -> None:
        """Begin a micro-batch; a muted one logs nothing."""
        self._batch, self._weights, self._is_muted = batch, weights, is_muted
        self._recent, self._num_calls, self._weighed_later = [], Counter(), []

    def hold(
        self,
        pl_module: Any,
        name: str,
        value: Any,
        weight: LogWeight | None,
        options: dict[str, Any],
    ) -> None:
        if self._is_muted:
            return
        called = (current_hook(pl_module), name)
        self._num_calls[called] += 1  # a name that is logged twice stays two logs
        held = self._held.setdefault((*called, self._num_calls[called]), _Held())
        number = len(held.weights)
        if isinstance(value, Tensor):
            if weight is None:
                self._recent.append((held, number, value.detach()))
            value = value.detach().reshape(()).clone()  # it may be written over
        held.values.append(value)
        held.weights.append(self._weight(name, weight))
        if weight is None or isinstance(weight, str):
            term = weight or next(iter(self._weights))
            self._weighed_later.append((held, number, term))
        size = options.pop("batch_size", None)
        if size is not None:
            held.batch_sizes.append(size)
        held.options = options

    def know_weights(self) -> None:
        """Weigh what was logged before `training_step` had said its weight."""
        for held, number, term in self._weighed_later:
            held.weights[number] = self._weights[term]

    def know_terms(self, terms: Mapping[str, Tensor], strategies: Strategies) -> None:
        """Weigh a log of a term's own tensor as the term; add it up if it is a sum."""
        for held, number, value in self._recent:
            for term, tensor in terms.items():
                if _is_same(value, tensor):
                    held.weights[number] = self._weights[term]
                    held.is_sum = strategies[term].loss_reduction != "mean"

    def log(self, pl_module: Any, *, num_rows: int) -> None:
        """Log each name once, as from the hook in which it was logged.

        Args:
            pl_module: whose logs.
            num_rows: of the loader batch, by which Lightning weighs a mean over the
                epoch where `batch_size` was not given.
        """
        for (hook, name, _), held in self._held.items():
            size = sum(held.batch_sizes) if held.batch_sizes else num_rows
            with as_hook(pl_module, hook):
                value = self._combined(name, held)
                pl_module.log(name, value, batch_size=size, **held.options)

    def _combined(self, name: str, held: _Held) -> Any:
        values = held.values
        if len(values) > 1 and isinstance(values[0], Metric):
            if held.options.get("on_step") is not False:
                self._metrics.say_step(name)
            return values[-1]
        if len(values) == 1:
            return values[0]
        device = next((v.device for v in values if isinstance(v, Tensor)), None)
        numbers = vector(values, device or torch.device("cpu"))
        total = _reduced(numbers, held)
        dtype = next((v.dtype for v in values if isinstance(v, Tensor)), None)
        if dtype is None or not dtype.is_floating_point:
            dtype = torch.get_default_dtype()
        return total.to(dtype)

    def _weight(self, name: str, weight: LogWeight | None) -> Weight:
        if weight is None:
            return next(iter(self._weights.values()))
        if isinstance(weight, AccumulationStrategy):
            return weight.weight(self._batch)
        if not isinstance(weight, str):
            return weight
        if weight not in self._weights:
            terms = sorted(filter(None, self._weights)) or "none"
            raise TrainkitError(
                f"self.log({name!r}, weight={weight!r}): there is no such term; the "
                f"terms of self.accumulation are: {terms}. Name one of them, or pass a "
                f"number or a strategy, such as PerSample()."
            )
        return self._weights[weight]


def is_loggable(value: Any) -> bool:
    """Whether Lightning can log the value; Lightning itself refuses other values."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, Number | Metric)


def by_name(args: Sequence[Any]) -> dict[str, Any]:
    """Lightning's options, given by position, by their names."""
    return dict(zip(OPTIONS, args, strict=False))


def _reduced(numbers: Tensor, held: _Held) -> Tensor:
    reduce_fx = held.options.get("reduce_fx", "mean")
    kind = str(getattr(reduce_fx, "__name__", reduce_fx)).lower()
    kind = "sum" if held.is_sum else kind
    if kind in ("max", "min", "sum"):
        return {"max": numbers.amax, "min": numbers.amin, "sum": numbers.sum}[kind]()
    weights = vector(held.weights, numbers.device)
    total = weights.sum()
    # A mean over nothing is NaN, and NaN * 0 is NaN.
    weighed = numbers.where(weights != 0, 0.0).dot(weights) / total
    return torch.where(total == 0, numbers.mean(), weighed)


def _is_same(value: Tensor, term: Tensor) -> bool:
    """Whether a value is a term, or the term detached: they share their storage."""
    return value.data_ptr() == term.data_ptr() and value.dtype == term.dtype
