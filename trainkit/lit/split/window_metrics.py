"""The step values of metric objects, over a whole window."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torchmetrics import MeanMetric, Metric
from torchmetrics.wrappers import Running

from trainkit.core.strategies import Weight
from trainkit.errors import TrainkitError
from trainkit.lit._compat import set_batch_value
from trainkit.lit.split.metric_calls import (
    MetricCalls,
    Moment,
    are_alone,
    compute_all,
)


@dataclass(eq=False)
class _Followed:
    """A metric object, and the copies that see a window alone.

    Attributes:
        metric: the module's; as a key of a dict it would not do, since its hash changes
            with its state.
        fresh: a copy that nothing has been given.
        copies: one for each of its calls in a micro-batch.
        num_calls: those of the present one.
        num_used: how many copies this window has given something; what a wrapper of
            another metric is given does not count as its own update.
        values: of the window that was closed last, one for each call.
    """

    metric: Metric
    fresh: Metric
    copies: list[Metric] = field(default_factory=list)
    num_calls: int = 0
    num_used: int = 0
    values: list[Any] = field(default_factory=list)

    def next_copy(self) -> Metric:
        if self.num_calls == len(self.copies):
            self.copies.append(copy.deepcopy(self.fresh))
        self.num_calls += 1
        self.num_used = max(self.num_used, self.num_calls)
        return self.copies[self.num_calls - 1]


Source: TypeAlias = tuple[_Followed | MetricCalls, int, Any]
"""A metric object, which of its calls, and the key in what that returned, if a dict;
or the object's `compute`, 0 and the key."""


class WindowMetrics:
    """Lets a metric's step value be that of the window, not of its last micro-batch.

    A metric object that is called adds the micro-batch to its own state, which is right
    for the epoch, and keeps the micro-batch's value for the step. So each call is
    followed by a copy that sees the window alone; its value takes the place of the last
    one, and of what the call had returned, where that is logged. What `training_step`
    asks of its other methods is for `MetricCalls`.

    A `MeanMetric` that is given one number for a batch, a loss say, counts it once. It
    counts that of a micro-batch by its share in the loader batch.

    Args:
        pl_module: whose metrics, on the device on which they will be.
        num_ranks: how many share a window.
    """

    def __init__(self, pl_module: Any, num_ranks: int) -> None:
        self._followed: list[_Followed] = []
        self._direct: list[MetricCalls] = []
        self._patch = ExitStack()
        self._moment = Moment()
        self._is_fresh = True
        self._has_ranks = num_ranks > 1
        self._returned: list[tuple[Tensor, Source]] = []
        self._module = pl_module
        self.find()

    def find(self) -> None:
        """Look for metric objects; a `MetricTracker` makes one for each epoch."""
        known = {id(each.metric) for each in self._followed}
        for name, module in self._module.named_modules():
            if not isinstance(module, Metric) or id(module) in known:
                continue
            if self._has_ranks and module.dist_sync_on_step:
                raise TrainkitError(
                    f"metric {name}: with dist_sync_on_step=True it waits for the "
                    f"other ranks in every micro-batch, and ranks may have different "
                    f"numbers of them. Leave it out: the epoch's value is synchronised "
                    f"all the same."
                )
            if isinstance(module, Running):
                _announce_running(name, module)
            fresh = copy.deepcopy(module)
            fresh.reset()
            # Ranks may have different numbers of micro-batches, and so of copies.
            fresh.distributed_available_fn = are_alone
            followed = _Followed(module, fresh)
            self._followed.append(followed)
            self._direct.append(self._methods_of(name, module, followed))

    @property
    def are_any(self) -> bool:
        """Whether the module has metric objects at all."""
        return bool(self._followed)

    def open(self, num_micro_batches: int) -> None:
        """A window begins.

        With several ranks this includes a window of one micro-batch, since all ranks
        must compute together.
        """
        if num_micro_batches == 1 and not self._has_ranks:
            return
        self._is_fresh = True
        for each in self._followed:
            each.values = []
        for each in self._direct:
            self._patch.enter_context(each.patched())

    def begin(self, share: Weight, *, is_muted: bool) -> None:
        """A micro-batch begins.

        Args:
            share: its part of the loader batch.
            is_muted: whether it does not count.
        """
        self._share, self._moment.is_muted = share, is_muted
        self._moment.is_first, self._is_fresh = self._is_fresh, False
        self._returned = []
        for each in self._followed:
            each.num_calls = 0
        for each in self._direct:
            each.begin()

    def close(self) -> None:
        """The window is complete: the step values become its own."""
        self._patch.close()
        for each in self._followed:
            used = each.copies[: each.num_used]
            if used:
                each.values = [own.compute() for own in used]
                set_batch_value(each.metric, each.values[-1])
        compute_all(self._direct)
        self._clear()

    def end_logs(self) -> None:
        """Its values are logged."""
        for each in self._direct:
            each.reset_late()

    def forget(self) -> None:
        """The window is begun again, or ends in an error."""
        self._patch.close()
        self._clear()
        for each in self._direct:
            each.forget()

    def _clear(self) -> None:
        self._returned = []
        for each in self._followed:
            each.num_used = 0
            for own in each.copies:
                own.reset()

    def source_of(self, value: Tensor) -> Source | None:
        """The call that returned a tensor in this micro-batch, if one did."""
        found = (source for each, source in self._returned if each is value)
        return next(found, None)

    def value_of(self, source: Source) -> Any:
        """What the call would have returned for the whole window, once it is closed."""
        origin, number, key = source
        is_direct = isinstance(origin, MetricCalls)
        value = origin.value if is_direct else origin.values[number]
        return value if key is None else value[key]

    def _methods_of(
        self, name: str, metric: Metric, followed: _Followed
    ) -> MetricCalls:
        is_mean = isinstance(metric, MeanMetric)

        def make_update(update: Callable[..., Any]) -> Callable[..., Any]:
            return partial(self._update_mean, update) if is_mean else update

        def called(args: Any, kwargs: Any, result: Any) -> Any:
            if self._moment.is_muted:
                return result
            make_update(followed.next_copy().update)(*args, **kwargs)
            return self._remember((followed, followed.num_calls - 1), result)

        def returned(result: Any) -> Any:
            return self._remember((calls, 0), result)

        calls = MetricCalls(
            self._module, name, metric, self._moment, make_update, called, returned
        )
        return calls

    def _remember(self, call: tuple[Any, int], result: Any) -> Any:
        """Know what a call returned when it is logged."""
        if isinstance(result, Mapping):
            result = _each_its_own(result)
        items = result.items() if isinstance(result, Mapping) else [(None, result)]
        self._returned += [
            (value, (*call, key)) for key, value in items if isinstance(value, Tensor)
        ]
        return result

    def _update_mean(
        self, update: Callable[..., Any], value: Any, weight: Any = None
    ) -> None:
        if weight is not None:
            update(value, weight)
        elif isinstance(value, Tensor) and value.ndim:
            update(value)  # each entry counts, in whatever micro-batch
        else:
            update(_unless_nothing(value, self._share), self._share)


def _each_its_own(results: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """A copy of the results in which no tensor stands under two names.

    The tensor that is logged shows which result was logged.
    """
    if len({id(value) for value in results.values()}) == len(results):
        return results
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in results.items()}


def _unless_nothing(value: Any, share: Weight) -> Any:
    """A mean over nothing is NaN, and is 0 here."""
    if isinstance(share, Tensor):
        number = torch.as_tensor(value, device=share.device)
        return torch.where(share == 0, 0, number)
    return value if share else 0.0


def _announce_running(name: str, metric: Running) -> None:
    warnings.warn(
        f"metric {name}: {type(metric).__name__} looks back over its last "
        f"{metric.window} updates, and in training_step it is updated once for each "
        f"micro-batch, so it looks back over less than as many loader batches. Update "
        f"it in on_train_batch_end, which runs once a step.",
        stacklevel=2,
    )
