"""Metric objects that `training_step` updates in every micro-batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MeanMetric, Metric

from trainkit.core.strategies import Weight
from trainkit.errors import TrainkitError
from trainkit.lit._compat import forget_computed, replaced, uncompiled
from trainkit.lit.split.micro_batches import CutBatch


class WindowMetrics:
    """Lets metric objects see the micro-batches of a window, one after another.

    All of them add to one state, so the value of the epoch is right. The value that
    Lightning logs for a step is that of the last micro-batch, which is said once. A
    `MeanMetric` that gets one number for a micro-batch, such as a loss, counts it by
    the micro-batch's share of the loader batch.

    Args:
        pl_module: the module that has the metrics, on its final device.
        num_ranks: how many ranks share a window.
    """

    def __init__(self, pl_module: Any, num_ranks: int) -> None:
        self._module, self._has_ranks = pl_module, num_ranks > 1
        self._patch = ExitStack()
        self._has_said: set[str] = set()
        self.find()

    def find(self) -> None:
        """Look for metric objects; a `MetricTracker` makes one for each epoch."""
        modules = self._module.named_modules()
        self._metrics = {name: m for name, m in modules if isinstance(m, Metric)}
        for name, metric in self._metrics.items():
            if self._has_ranks and metric.dist_sync_on_step:
                raise TrainkitError(
                    f"metric {name}: with dist_sync_on_step=True it waits for the "
                    f"other ranks in every micro-batch, and ranks may have different "
                    f"numbers of them. Leave it out: the epoch's value is synchronised "
                    f"all the same."
                )

    def open(self, current: CutBatch) -> None:
        """Begin a loader batch."""
        if len(current.parts) == 1 and not self._has_ranks:
            return
        for name, metric in self._metrics.items():
            if self._has_ranks:  # compute() must not wait for the other ranks
                alone = replaced(metric, distributed_available_fn=lambda: False)
                self._patch.enter_context(alone)
                self._patch.callback(forget_computed, metric)
            if isinstance(metric, MeanMetric):
                update = self._weighed(name, metric.update, current)
                update = uncompiled(self._module, update)
                self._patch.enter_context(replaced(metric, update=update))

    def close(self) -> None:
        """End the loader batch."""
        self._patch.close()

    def _weighed(
        self, name: str, update: Callable[..., Any], current: CutBatch
    ) -> Callable[..., Any]:
        def weighed(value: Any, weight: Any = None) -> None:
            if weight is not None:
                update(value, weight)
            elif isinstance(value, Tensor) and value.ndim:
                update(value)  # each entry counts once
            else:
                if current.are_said and len(current.parts) > 1:
                    self._say_by_rows(name)
                share = current.share()
                update(_unless_nothing(value, share), share)

        return weighed

    def _say_by_rows(self, name: str) -> None:
        if name not in self._has_said:
            self._has_said.add(name)
            warnings.warn(
                f"metric {name}: the number that it gets for a micro-batch counts by "
                f"the micro-batch's rows, since training_step has still to say what "
                f"the loss weighs. Give it the weight: self.{name}(value, weight=n).",
                stacklevel=2,
            )


def _unless_nothing(value: Any, share: Weight) -> Any:
    """The mean of a micro-batch; 0 instead of NaN if its share is 0."""
    if isinstance(share, Tensor):
        number = torch.as_tensor(value, device=share.device)
        return torch.where(share == 0, 0, number)
    return value if share else 0.0
