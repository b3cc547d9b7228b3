"""The step values of metric objects, over a whole window."""

from __future__ import annotations

import copy
from typing import Any

from torchmetrics import Metric

from trainkit.errors import TrainkitError
from trainkit.lit._compat import set_batch_value


class WindowMetrics:
    """Lets a metric's step value be that of the window, not of its last micro-batch.

    A metric object that is called adds the micro-batch to its own state, which is right
    for the epoch, and keeps the micro-batch's value for the step. So each is followed
    by a copy that sees the window alone; its value takes the place of the last one.

    Args:
        pl_module: whose metrics, on the device on which they will be.
        num_ranks: how many share a window.
    """

    def __init__(self, pl_module: Any, num_ranks: int) -> None:
        self._copies: dict[Metric, Metric] = {}
        self._used: dict[Metric, Metric] = {}
        self._hooks: list[Any] = []
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
            own = copy.deepcopy(module)
            own.reset()
            own.sync_on_compute = False
            self._copies[module] = own

    @property
    def metrics(self) -> list[Metric]:
        return list(self._copies)

    def open(self) -> None:
        """A window of several micro-batches begins."""
        for metric in self._copies:
            hook = metric.register_forward_hook(self._follow, with_kwargs=True)
            self._hooks.append(hook)

    def close(self) -> None:
        """It is complete: the step values become the window's."""
        self._remove_hooks()
        for metric, own in self._used.items():
            set_batch_value(metric, own.compute())
        self.forget()

    def forget(self) -> None:
        """The window is begun again, or ends in an error."""
        self._remove_hooks()
        for own in self._used.values():
            own.reset()
        self._used = {}

    def _follow(self, metric: Metric, args: Any, kwargs: Any, result: Any) -> None:
        own = self._used[metric] = self._copies[metric]
        own.update(*args, **kwargs)

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
