"""A metric object that `training_step` calls, in a window of several micro-batches."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import MeanMetric, Metric
from torchmetrics.wrappers.abstract import WrapperMetric

from trainkit.core.strategies import Weight
from trainkit.lit._compat import (
    forget_computed,
    replaced,
    set_batch_value,
    uncompiled,
)
from trainkit.lit.aside import Kept

NAMES = ("forward", "update", "compute", "reset")


class Source(NamedTuple):
    """Where a value that is logged came from.

    Attributes:
        calls: the metric object's.
        number: which of its calls in a micro-batch returned it; None for `compute`.
        key: its key, if the call returned a dict.
    """

    calls: MetricCalls
    number: int | None
    key: Any

    @property
    def value(self) -> Any:
        """What the call would have returned for the whole window, once it is closed."""
        number, key = self.number, self.key
        value = self.calls.computed if number is None else self.calls.values[number]
        return value if key is None else value[key]


@dataclass
class Moment:
    """The present micro-batch, as all metric objects need to know it.

    Attributes:
        is_first: whether it is the window's first.
        is_muted: whether it does not count.
        share: its part of the loader batch.
        by_rows: whether that is a part of its rows, since `training_step` has still
            to say the weight.
        returned: the tensors that metric objects have returned in it.
        depth: how many methods of metric objects run inside each other; `training_step`
            has called the outermost.
    """

    of_micro_batch = (
        "is_first",
        "is_muted",
        "share",
        "by_rows",
        "returned",
        "depth",
    )

    is_first: bool = True
    is_muted: bool = False
    share: Weight = 1
    by_rows: bool = False
    returned: list[tuple[Tensor, Source]] = field(default_factory=list)
    depth: int = 0

    @contextmanager
    def inside(self) -> Iterator[None]:
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1


class MetricCalls:
    """Lets the methods of a metric object do what they would do for the whole window.

    All micro-batches add to one state, which is right for the epoch. For the step, a
    copy of the object follows each call and sees the window alone; its value becomes
    the window's.

    In each micro-batch `compute` returns the value of this rank's state so far: ranks
    may have different numbers of micro-batches, and would wait for each other. When the
    last has been added, the window computes once, with all ranks.

    A `reset` before a micro-batch is added runs in the first one alone, since it would
    drop the rows of earlier ones. A `reset` after it waits for the window's end.

    A `MeanMetric` that is given one number for a batch, such as a loss, counts it once.
    The number of a micro-batch counts by its share in the loader batch, or in its rows
    if the weight is not known yet.

    Args:
        pl_module: the module that has the metric.
        name: the metric's name in the module.
        metric: the object.
        moment: the present micro-batch.

    Attributes:
        values: the values of the window that was closed last, one for each call.
        computed: what `compute` has returned for that window.
    """

    of_micro_batch = ("_num_calls", "_num_updates", "_is_updated", "_is_past")

    def __init__(
        self, pl_module: Any, name: str, metric: Metric, moment: Moment
    ) -> None:
        self.metric = metric
        self.values: list[Any] = []
        self.computed: Any = None
        self._name = name
        self._moment = moment
        self._fresh = copy.deepcopy(metric)
        self._fresh.reset()
        # Ranks may have different numbers of micro-batches, and so of copies.
        self._fresh.distributed_available_fn = are_alone
        self._copies: list[Metric] = []  # one for each call in a micro-batch
        self._num_used = 0  # copies that have a part of this window
        self._own: dict[str, Callable[..., Any]] = {}
        self._asked: tuple[Any, Any] | None = None
        self._resets_late = self._has_said = self._has_said_by_rows = False
        self._methods = {name: self._method(pl_module, name) for name in NAMES}
        self.begin()

    def patched(self) -> AbstractContextManager[None]:
        """The metric object with our methods, for a window."""
        self._own = {name: getattr(self.metric, name) for name in NAMES}
        self._own["update"] = self._weighed(self._own["update"])
        self.values = []
        self.forget()
        return replaced(
            self.metric, **self._methods, distributed_available_fn=are_alone
        )

    def begin(self) -> None:
        """Note that a micro-batch begins."""
        self._num_calls = 0
        self._num_updates = self.metric.update_count
        self._is_updated = self._is_past = False

    def close(self) -> None:
        """Take the step values of the window, which is complete."""
        used = self._copies[: self._num_used]
        if used:
            self.values = [each.compute() for each in used]
            set_batch_value(self.metric, self.values[-1])

    def clear(self) -> None:
        """Empty the copies."""
        self._num_used = 0
        for each in self._copies:
            each.reset()

    def reset_late(self) -> None:
        """Do the resets that have waited until the window's values were logged."""
        if self._resets_late:
            self.metric.reset()
        self.forget()

    def forget(self) -> None:
        """Forget which methods were called."""
        self._asked, self._resets_late = None, False

    @property
    def is_asked(self) -> bool:
        """Whether `training_step` has called `compute`."""
        return self._asked is not None

    def compute(self) -> None:
        """Compute the whole window's value, if `training_step` has called `compute`."""
        if self._asked is not None:
            args, kwargs = self._asked
            self.computed = self.metric.compute(*args, **kwargs)

    def _method(self, pl_module: Any, name: str) -> MethodType:
        ours = getattr(self, f"_{name}")

        def method(metric: Metric, *args: Any, **kwargs: Any) -> Any:
            if metric is not self.metric:  # a copy, made inside a step
                return getattr(type(metric), name)(metric, *args, **kwargs)
            if self._moment.depth and name != "forward":
                return self._own[name](*args, **kwargs)
            return ours(*args, **kwargs)

        method.__name__ = name  # pickling a copy needs it
        return MethodType(uncompiled(pl_module, method), self.metric)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._moment.depth:
            self._note_update()
        with self._moment.inside():
            result = self._own["forward"](*args, **kwargs)
        if self._moment.is_muted:
            return result
        number = self._num_calls
        if number == len(self._copies):
            self._copies.append(copy.deepcopy(self._fresh))
        self._num_calls += 1
        self._num_used = max(self._num_used, self._num_calls)
        own = vars(self._copies[number])
        for name, value in vars(self.metric).items():
            if name not in NAMES:  # an option that training_step has set
                own.setdefault(name, value)
        self._weighed(self._copies[number].update)(*args, **kwargs)
        return self._remember(result, number)

    def _update(self, *args: Any, **kwargs: Any) -> Any:
        self._note_update()
        with self._moment.inside():
            return self._own["update"](*args, **kwargs)

    def _compute(self, *args: Any, **kwargs: Any) -> Any:
        # `compute` of some wrappers keeps its result, such as the least value so far.
        is_kept = isinstance(self.metric, WrapperMetric)
        kept = Kept(self.metric, generators=False) if is_kept else None
        with self._moment.inside():
            value = self._own["compute"](*args, **kwargs)
        if kept is not None:
            kept.restore()
        if self._moment.is_muted:
            return value
        self._asked, self._is_past = (args, kwargs), True
        return self._remember(value, None)

    def _reset(self) -> None:
        if self._moment.is_muted:
            return
        # In a collection, one metric updates the state that several share.
        if self._is_updated or self.metric.update_count != self._num_updates:
            self._resets_late = self._is_past = True
        elif self._moment.is_first:
            with self._moment.inside():
                self._own["reset"]()
            self._num_updates = self.metric.update_count

    def _note_update(self) -> None:
        self._is_updated = True
        if self._is_past and not self._has_said:
            self._has_said = True
            warnings.warn(
                f"metric {self._name}: training_step adds to it after compute() or "
                f"reset(), in the same step. With several micro-batches compute() "
                f"gives self.log the value of the whole step, with all that is added "
                f"in it. Use a metric object for each value.",
                stacklevel=2,
            )

    def _remember(self, result: Any, number: int | None) -> Any:
        """Note what a call returns, to recognize it when it is logged."""
        if isinstance(result, Mapping):
            result = _each_its_own(result)
        items = result.items() if isinstance(result, Mapping) else [(None, result)]
        self._moment.returned += [
            (value, Source(self, number, key))
            for key, value in items
            if isinstance(value, Tensor)
        ]
        return result

    def _weighed(self, update: Callable[..., Any]) -> Callable[..., Any]:
        is_mean = isinstance(self.metric, MeanMetric)
        return partial(self._update_mean, update) if is_mean else update

    def _update_mean(
        self, update: Callable[..., Any], value: Any, weight: Any = None
    ) -> None:
        share = self._moment.share
        if weight is not None:
            update(value, weight)
        elif isinstance(value, Tensor) and value.ndim:
            update(value)  # each entry counts once
        else:
            self._say_by_rows()
            update(_unless_nothing(value, share), share)

    def _say_by_rows(self) -> None:
        if self._moment.by_rows and not self._has_said_by_rows:
            self._has_said_by_rows = True
            warnings.warn(
                f"metric {self._name}: the number that it gets for a micro-batch "
                f"counts by the micro-batch's rows, since training_step has still to "
                f"say what the loss weighs. Give it the weight: "
                f"self.{self._name}(value, weight=n).",
                stacklevel=2,
            )


def compute_all(calls: list[MetricCalls]) -> None:
    """Compute the values asked for; on several ranks all of them together."""
    if any(each.is_asked for each in calls):
        for each in calls:  # even if not asked: another metric may wrap it
            forget_computed(each.metric)
        for each in calls:
            each.compute()


def are_alone() -> bool:
    """False: `compute` of torchmetrics must not ask other ranks."""
    return False


def _each_its_own(results: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """The results, in which no tensor stands under two names: the tensor that is logged
    shows which result was logged."""
    if len({id(value) for value in results.values()}) == len(results):
        return results
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in results.items()}


def _unless_nothing(value: Any, share: Weight) -> Any:
    """The mean of a micro-batch; 0 instead of NaN if its share is 0."""
    if isinstance(share, Tensor):
        number = torch.as_tensor(value, device=share.device)
        return torch.where(share == 0, 0, number)
    return value if share else 0.0
