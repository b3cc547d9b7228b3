"""What `training_step` logs and returns in micro-batches, put together for a window;
the metrics that it updates."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import MeanMetric, Metric

from trainkit.core.nested import length_of, with_tensors
from trainkit.core.strategies import AccumulationStrategy, Strategies, Weight
from trainkit.core.terms import terms_of
from trainkit.core.window import vector
from trainkit.errors import TrainkitError
from trainkit.lit._compat import (
    as_hook,
    current_hook,
    forget_computed,
    replaced,
    uncompiled,
)
from trainkit.lit.split.micro_batches import CutWindow, like, weighted_mean

OPTIONS = tuple(inspect.signature(LightningModule.log).parameters)[3:]
"""The parameters of Lightning's `log` after the name and the value."""


@dataclass
class _Logged:
    """A value that a micro-batch has logged.

    Attributes:
        index: of the micro-batch.
        original: the tensor itself, until the micro-batch has ended.
        weight: what it weighs; a text is a term, whose weight it has.
        is_sum: whether it is a loss that is a sum over rows.
    """

    index: int
    value: Any
    original: Tensor | None
    weight: Weight | str
    options: dict[str, Any]
    is_sum: bool = False


class HeldLogs:
    """Combines the values of a window's micro-batches into those of one batch.

    Means are weighed as the loss is, by the strategy, or by `weight=`. Sums are added
    up, and of several extremes the extreme is taken. A metric object is logged once.

    Args:
        pl_module: whose logs.

    Attributes:
        log: stands in place of the module's `log`, and of the one that Lightning gives
            each callback, while a window runs.
        current: the window that is being run.
    """

    def __init__(self, pl_module: Any) -> None:
        self._module, self._has_said_step = pl_module, False
        self.log = uncompiled(pl_module, self._hold)
        self.current: Any = None

    def _hold(
        self, name: str, value: Any, *args: Any, weight: Any = None, **options: Any
    ) -> None:
        hook = current_hook(self._module)
        if not is_loggable(value):  # Lightning refuses it by name
            type(self._module).log(self._module, name, value, *args, **options)
            return
        current, original = self.current, None
        if current.is_filler:
            return
        if isinstance(value, Tensor):
            original = value.detach() if weight is None else None
            value = value.detach().reshape(()).clone()  # it may be written over
        options |= dict(zip(OPTIONS, args, strict=False))
        weight = self._weight(name, weight)
        logged = _Logged(current.index, value, original, weight, options)
        # Several logs of one name in a micro-batch stay several.
        logs = current.logged.setdefault(hook, {}).setdefault(name, [])
        number = [each[-1].index for each in logs].count(logged.index)
        if number == len(logs):
            logs.append([])
        logs[number].append(logged)

    def _weight(self, name: str, weight: Any) -> Weight | str:
        current = self.current
        if weight is None:
            return next(iter(current.weights))
        if isinstance(weight, AccumulationStrategy):
            return weight.weight(current.batch)
        if isinstance(weight, str) and weight not in current.weights:
            terms = sorted(filter(None, current.weights)) or "none"
            raise TrainkitError(
                f"self.log({name!r}, weight={weight!r}): there is no such term; the "
                f"terms of self.accumulation are: {terms}. Name one of them, or pass a "
                f"number or a strategy, such as PerSample()."
            )
        return weight

    def know_terms(self, terms: Mapping[str, Tensor], strategies: Strategies) -> None:
        """Weigh a log of a term's own tensor as the term; add it up if it is a sum."""
        for _, _, several in self._all():
            each = several[-1]
            original, each.original = each.original, None
            for term, tensor in terms.items():
                if original is not None and _is_same(original, tensor):
                    each.weight = term
                    each.is_sum = strategies[term].loss_reduction != "mean"

    def _all(self) -> Iterator[tuple[str, str, list[_Logged]]]:
        """The logs of the window, hook after hook: Lightning drops an epoch's
        first logs of one that comes back."""
        for hook, by_name in self.current.logged.items():
            for name, logs in by_name.items():
                yield from ((hook, name, several) for several in logs)

    def combine(self) -> None:
        """Log each name once, as from its hook."""
        for hook, name, several in self._all():
            options = several[-1].options
            # By it Lightning weighs a mean over the epoch.
            sizes = [each.options.get("batch_size") for each in several]
            sizes = [size for size in sizes if size is not None]
            options["batch_size"] = sum(sizes) if sizes else self.current.num_rows
            with as_hook(self._module, hook):
                self._module.log(name, self._combined(name, several), **options)

    def _combined(self, name: str, several: list[_Logged]) -> Any:
        values, last = [each.value for each in several], several[-1]
        if len(values) == 1:
            return values[0]
        if isinstance(values[0], Metric):
            if last.options.get("on_step") is not False:
                self._say_step(name)
            return values[-1]
        reduce_fx = last.options.get("reduce_fx", "mean")
        kind = str(getattr(reduce_fx, "__name__", reduce_fx)).lower()
        kind = "sum" if last.is_sum else kind
        if kind in ("max", "min", "sum"):
            device, dtype = like(values)
            numbers = vector(values, device)
            reduced = {"max": numbers.amax, "min": numbers.amin, "sum": numbers.sum}
            return reduced[kind]().to(dtype)
        weights = self.current.weights
        return weighted_mean(
            values,
            [
                weights[each.weight][each.index]
                if isinstance(each.weight, str)
                else each.weight
                for each in several
            ],
        )

    def _say_step(self, name: str) -> None:
        """Say once that the step's value of a logged object is the last part's."""
        if not self._has_said_step:
            self._has_said_step = True
            warnings.warn(
                f"self.log({name!r}): the value of a metric object on a step is that "
                f"of the last micro-batch; the epoch's is that of all rows. "
                f"on_step=False logs the latter alone. Said once.",
                stacklevel=2,
            )


def is_loggable(value: Any) -> bool:
    """Whether Lightning can log the value; Lightning itself refuses other values."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, Number | Metric)


def _is_same(value: Tensor, term: Tensor) -> bool:
    """Whether a value is a term, or the term detached: they share their storage."""
    return value.data_ptr() == term.data_ptr() and value.dtype == term.dtype


class WindowMetrics:
    """Lets metric objects see the micro-batches of a window, one after another.

    All of them add to one state, so the value of the epoch is right. The value that
    Lightning logs for a step is that of the last micro-batch, which is said once. A
    `MeanMetric` that gets one number for a micro-batch, such as a loss, counts it by
    its share of the window.

    Args:
        pl_module: the module that has the metrics, on its final device.
        num_ranks: how many ranks share a window.

    Attributes:
        found: the metric objects.
    """

    def __init__(self, pl_module: Any, num_ranks: int) -> None:
        self._module, self._has_ranks = pl_module, num_ranks > 1
        self.find()

    def find(self) -> None:
        """Look for metric objects; a `MetricTracker` makes one for each epoch."""
        modules = self._module.named_modules()
        self.found = [m for _, m in modules if isinstance(m, Metric)]

    @contextmanager
    def seeing(self, current: CutWindow) -> Iterator[None]:
        """A context in which the micro-batches of a window run."""
        with ExitStack() as stack:
            is_alone = len(current.parts) == 1 and not self._has_ranks
            for metric in () if is_alone else self.found:
                if self._has_ranks:  # nothing must wait for the other ranks
                    alone = replaced(metric, distributed_available_fn=lambda: False)
                    stack.enter_context(alone)
                    stack.callback(forget_computed, metric)
                if isinstance(metric, MeanMetric):
                    update = self._weighed(metric.update, current)
                    update = uncompiled(self._module, update)
                    stack.enter_context(replaced(metric, update=update))
            yield

    @staticmethod
    def _weighed(update: Callable[..., Any], current: CutWindow) -> Callable[..., Any]:
        def weighed(value: Any, weight: Any = None) -> None:
            if weight is not None:
                update(value, weight)
            elif isinstance(value, Tensor) and value.ndim:
                update(value)  # each entry counts once
            else:
                share = current.share()
                update(_unless_nothing(value, share), share)

        return weighed


def _unless_nothing(value: Any, share: Weight) -> Any:
    """The mean of a micro-batch; 0 instead of NaN if its share is 0."""
    if isinstance(share, Tensor):
        number = torch.as_tensor(value, device=share.device)
        return torch.where(share == 0, 0, number)
    return value if share else 0.0


# ---- what is returned ----------------------------------------------------------------


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


def put_together(batch: CutWindow) -> dict[str, Any]:
    """What was returned beside the losses of a window's micro-batches.

    A tensor or list with one entry for each row is put into the loader's order. A
    tensor that is one floating number becomes its mean, weighed as the loss is. All
    else becomes a list with the values of all micro-batches, in the order in which they
    ran.
    """
    parts, extras = [batch.parts[index] for index in batch.extras], []
    for part, found in zip(parts, batch.extras.values(), strict=True):
        stop, length = len(part.rows), len(part.rows) + part.num_fillers
        is_filled = part.num_fillers > 0
        extras.append(
            {
                name: each[:stop] if is_filled and length_of(each) == length else each
                for name, each in found.items()
            }
        )
    if len(extras) == 1:
        return extras[0]
    rows = [part.rows for part in parts]
    weights = [batch.leading[index] for index in batch.extras]
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
    if not all(isinstance(each, Tensor) for each in values):
        return values
    if all(each.ndim == 0 and each.is_floating_point() for each in values):
        return weighted_mean(values, weights)
    by_row = [(length, *values[0].shape[1:]) for length in lengths]
    if not values[0].ndim or by_row != [tuple(each.shape) for each in values]:
        return values
    return torch.cat(values)[places]
