"""The step values of metric objects, over a whole window."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
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


Source: TypeAlias = tuple[_Followed, int, Any]
"""A metric object, which of its calls, and the key in what that returned, if a dict."""


class WindowMetrics:
    """Lets a metric's step value be that of the window, not of its last micro-batch.

    A metric object that is called adds the micro-batch to its own state, which is right
    for the epoch, and keeps the micro-batch's value for the step. So each call is
    followed by a copy that sees the window alone; its value takes the place of the last
    one, and of what the call had returned, where that is logged.

    A `MeanMetric` that is given one number for a batch, a loss say, counts it once. It
    counts that of a micro-batch by its share in the loader batch.

    Args:
        pl_module: whose metrics, on the device on which they will be.
        num_ranks: how many share a window.
    """

    def __init__(self, pl_module: Any, num_ranks: int) -> None:
        self._followed: list[_Followed] = []
        self._hooks: list[Any] = []
        self._means: list[tuple[Metric, Callable[..., Any]]] = []
        self._returned: list[tuple[Tensor, Source]] = []
        for name, module in pl_module.named_modules():
            if not isinstance(module, Metric):
                continue
            if num_ranks > 1 and module.dist_sync_on_step:
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
            fresh.distributed_available_fn = _alone
            self._followed.append(_Followed(module, fresh))

    @property
    def are_any(self) -> bool:
        """Whether the module has metric objects at all."""
        return bool(self._followed)

    def open(self) -> None:
        """A window of several micro-batches begins."""
        for each in self._followed:
            each.values = []
            follow = partial(self._follow, each)
            hook = each.metric.register_forward_hook(follow, with_kwargs=True)
            self._hooks.append(hook)
            if isinstance(each.metric, MeanMetric):
                update = each.metric.update
                self._means.append((each.metric, update))
                each.metric.update = partial(self._update_mean, update)

    def begin(self, share: Weight, *, is_muted: bool) -> None:
        """A micro-batch begins.

        Args:
            share: its part of the loader batch.
            is_muted: whether it does not count.
        """
        self._share, self._is_muted = share, is_muted
        self._returned = []
        for each in self._followed:
            each.num_calls = 0

    def close(self) -> None:
        """It is complete: the step values become the window's."""
        for each in self._followed:
            used = each.copies[: each.num_used]
            if used and self._hooks:
                each.values = [own.compute() for own in used]
                set_batch_value(each.metric, each.values[-1])
        self.forget()

    def forget(self) -> None:
        """The window is begun again, or ends in an error."""
        for hook in self._hooks:
            hook.remove()
        for metric, update in self._means:
            metric.update = update
        self._hooks, self._means, self._returned = [], [], []
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
        followed, number, key = source
        value = followed.values[number]
        return value if key is None else value[key]

    def _follow(
        self, followed: _Followed, metric: Metric, args: Any, kwargs: Any, result: Any
    ) -> Any:
        if self._is_muted:
            return result
        own = followed.next_copy()
        if isinstance(metric, MeanMetric):
            self._update_mean(own.update, *args, **kwargs)
        else:
            own.update(*args, **kwargs)
        number = followed.num_calls - 1
        if isinstance(result, Mapping):
            result = _each_its_own(result)
        items = result.items() if isinstance(result, Mapping) else [(None, result)]
        self._returned += [
            (value, (followed, number, key))
            for key, value in items
            if isinstance(value, Tensor)
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
    """The same values, none of them under two names: by the tensor that is logged it is
    known what was logged."""
    if len({id(value) for value in results.values()}) == len(results):
        return results
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in results.items()}


def _unless_nothing(value: Any, share: Weight) -> Any:
    """A mean over nothing is NaN, and is 0 here."""
    if isinstance(share, Tensor):
        number = torch.as_tensor(value, device=share.device)
        return torch.where(share == 0, 0, number)
    return value if share else 0.0


def _alone() -> bool:
    """There are no other ranks to ask, says this to torchmetrics in `compute`."""
    return False


def _announce_running(name: str, metric: Running) -> None:
    warnings.warn(
        f"metric {name}: {type(metric).__name__} looks back over its last "
        f"{metric.window} updates, and in training_step it is updated once for each "
        f"micro-batch, so it looks back over less than as many loader batches. Update "
        f"it in on_train_batch_end, which runs once a step.",
        stacklevel=2,
    )
