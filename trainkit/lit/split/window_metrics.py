"""The step values of metric objects, over a whole window."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from torchmetrics import Metric
from torchmetrics.wrappers import Running

from trainkit.core.strategies import Weight
from trainkit.errors import TrainkitError
from trainkit.lit.split.metric_calls import MetricCalls, Moment, Source, compute_all


class WindowMetrics:
    """Makes the step value of each metric object that of the window.

    A metric object that is called adds the micro-batch to its own state, and keeps the
    micro-batch's value for the step. The window's value takes the place of the last
    one, and of a value that was logged.

    Args:
        pl_module: the module that has the metrics, on its final device.
        num_ranks: how many ranks share a window.
    """

    def __init__(self, pl_module: Any, num_ranks: int) -> None:
        self._calls: list[MetricCalls] = []
        self._patch = ExitStack()
        self._moment = Moment()
        self._is_fresh = True
        self._has_ranks = num_ranks > 1
        self._module = pl_module
        self.find()

    def find(self) -> None:
        """Look for metric objects; a `MetricTracker` makes one for each epoch."""
        # Not a set of objects: the hash of a metric changes with its state.
        known = {id(each.metric) for each in self._calls}
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
            self._calls.append(MetricCalls(self._module, name, module, self._moment))

    @property
    def are_any(self) -> bool:
        """Whether the module has metric objects at all."""
        return bool(self._calls)

    @property
    def turning(self) -> list[Any]:
        """The objects that hold something of the micro-batch under way."""
        return [self._moment, *self._calls]

    def open(self, num_micro_batches: int) -> None:
        """Begin a window.

        With several ranks this includes a window of one micro-batch, since all ranks
        must compute together.
        """
        if num_micro_batches == 1 and not self._has_ranks:
            return
        self._is_fresh = True
        for each in self._calls:
            self._patch.enter_context(each.patched())

    def begin(self, share: Weight, *, is_muted: bool, by_rows: bool = False) -> None:
        """Begin a micro-batch.

        Args:
            share: its part of the loader batch.
            is_muted: whether it does not count.
            by_rows: whether the share is of the rows, and not of the weight.
        """
        moment, moment.by_rows = self._moment, by_rows
        moment.share, moment.is_muted, moment.returned = share, is_muted, []
        moment.is_first, self._is_fresh = self._is_fresh, False
        for each in self._calls:
            each.begin()

    def close(self) -> None:
        """Make the step values the window's, which is complete."""
        self._patch.close()
        for each in self._calls:
            each.close()
        compute_all(self._calls)
        self._clear()

    def end_logs(self) -> None:
        """Do what waits until the window's values are logged."""
        for each in self._calls:
            each.reset_late()

    def forget(self) -> None:
        """Forget the window, which begins again or has ended in an error."""
        self._patch.close()
        self._clear()
        for each in self._calls:
            each.forget()

    def _clear(self) -> None:
        self._moment.returned = []
        for each in self._calls:
            each.clear()

    def source_of(self, value: Tensor) -> Source | None:
        """The call that returned a tensor in this micro-batch, if one did."""
        found = (source for each, source in self._moment.returned if each is value)
        return next(found, None)


def _announce_running(name: str, metric: Running) -> None:
    warnings.warn(
        f"metric {name}: {type(metric).__name__} looks back over its last "
        f"{metric.window} updates, and in training_step it is updated once for each "
        f"micro-batch, so it looks back over less than as many loader batches. Update "
        f"it in on_train_batch_end, which runs once a step.",
        stacklevel=2,
    )
