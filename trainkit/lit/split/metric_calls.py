"""The methods of a metric object, where `training_step` calls them itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torchmetrics import Metric
from torchmetrics.wrappers.abstract import WrapperMetric

from trainkit.lit._compat import forget_computed, replaced, uncompiled
from trainkit.lit.rerun.snapshot import Snapshot

NAMES = ("forward", "update", "compute", "reset")


@dataclass
class Moment:
    """The micro-batch that runs, as all metric objects need to know it.

    Attributes:
        is_first: whether it is the window's first.
        is_muted: whether it does not count.
        depth: how many methods of metric objects run inside each other: only what the
            outermost does was asked by `training_step`.
    """

    is_first: bool = True
    is_muted: bool = False
    depth: int = 0

    @contextmanager
    def inside(self) -> Iterator[None]:
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1


class MetricCalls:
    """Lets `update`, `compute` and `reset` of a metric object do what they would do for
    the whole window.

    All micro-batches add to one state. In each of them `compute` goes by this rank's
    state so far: ranks may have different numbers of micro-batches, and would wait for
    each other. When the last has been added, the window computes once, with all ranks.

    A `reset` before a micro-batch is added is done in the first one alone, else the
    rows of earlier ones would be lost; one after it waits for the window's end.

    Args:
        pl_module: whose metric it is.
        name: the metric's, in the module.
        metric: the object.
        moment: the micro-batch that runs.
        update: what adds to it, given its own `update`.
        called: is given what it was called with and what that returned, and returns it.
        returned: is given what `compute` returned, and returns it.

    Attributes:
        value: what `compute` has returned for the window that was closed last.
    """

    def __init__(
        self,
        pl_module: Any,
        name: str,
        metric: Metric,
        moment: Moment,
        update: Callable[[Callable[..., Any]], Callable[..., Any]],
        called: Callable[[Any, Any, Any], Any],
        returned: Callable[[Any], Any],
    ) -> None:
        self.metric = metric
        self.value: Any = None
        self._name = name
        self._moment = moment
        self._make_update = update
        self._called = called
        self._returned = returned
        self._own: dict[str, Callable[..., Any]] = {}
        self._asked: tuple[Any, Any] | None = None
        self._resets_late = self._has_said = False
        self._methods = {name: self._method(pl_module, name) for name in NAMES}
        self.begin()

    def patched(self) -> AbstractContextManager[None]:
        """The metric object with our methods, for a window."""
        self._own = {name: getattr(self.metric, name) for name in NAMES}
        self._own["update"] = self._make_update(self._own["update"])
        self.forget()
        return replaced(
            self.metric, **self._methods, distributed_available_fn=are_alone
        )

    def begin(self) -> None:
        """A micro-batch begins."""
        self._num_updates = self.metric.update_count
        self._is_updated = self._is_past = False

    def close(self) -> None:
        """The window is complete, and the metric object has its own methods again."""
        if self._asked is not None:
            args, kwargs = self._asked
            self.value = self.metric.compute(*args, **kwargs)

    def reset_late(self) -> None:
        """Do the resets that have waited until the window's values were logged."""
        if self._resets_late:
            self.metric.reset()
        self.forget()

    def forget(self) -> None:
        """Forget what was asked of the metric object."""
        self._asked, self._resets_late = None, False

    @property
    def is_asked(self) -> bool:
        """Whether the window's value is asked for."""
        return self._asked is not None

    def _method(self, pl_module: Any, name: str) -> MethodType:
        ours = getattr(self, f"_{name}")

        def method(metric: Metric, *args: Any, **kwargs: Any) -> Any:
            if metric is not self.metric:  # a copy, made inside a step
                return getattr(type(metric), name)(metric, *args, **kwargs)
            if self._moment.depth and name != "forward":
                return self._own[name](*args, **kwargs)
            return ours(*args, **kwargs)

        method.__name__ = name  # by which a copy is pickled
        return MethodType(uncompiled(pl_module, method), self.metric)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._moment.depth:
            self._note_update()
        with self._moment.inside():
            result = self._own["forward"](*args, **kwargs)
        return self._called(args, kwargs, result)

    def _update(self, *args: Any, **kwargs: Any) -> Any:
        self._note_update()
        with self._moment.inside():
            return self._own["update"](*args, **kwargs)

    def _compute(self, *args: Any, **kwargs: Any) -> Any:
        # That of some wrappers keeps what it has found, the least value say.
        is_kept = isinstance(self.metric, WrapperMetric)
        kept = Snapshot(self.metric, generators=False) if is_kept else None
        with self._moment.inside():
            value = self._own["compute"](*args, **kwargs)
        if kept is not None:
            kept.restore()
        if self._moment.is_muted:
            return value
        self._asked, self._is_past = (args, kwargs), True
        return self._returned(value)

    def _reset(self) -> None:
        if self._moment.is_muted:
            return
        # In a collection those that share a state are updated by one of them.
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


def compute_all(calls: list[MetricCalls]) -> None:
    """Compute what was asked for; on several ranks all of them together."""
    if any(each.is_asked for each in calls):
        for each in calls:  # also what a wrapper holds
            forget_computed(each.metric)
        for each in calls:
            each.close()


def are_alone() -> bool:
    """False: `compute` of torchmetrics must not ask other ranks."""
    return False
