"""The state of a loader batch while its micro-batches run."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from trainkit.core.strategies import Weight
from trainkit.core.window import quotient
from trainkit.lit.split.held_logs import HeldLogs
from trainkit.lit.split.micro_batches import WeighedMicroBatch
from trainkit.lit.split.outputs import Returned


@dataclass
class CurrentWindow:
    """A loader batch that is being run.

    Attributes:
        micro_batches: its micro-batches.
        is_whole_window: whether the window is this loader batch alone, so that its
            total is known beforehand.
        closes: whether the window closes with it.
        logs: its logs so far.
        returned: the outputs of its micro-batches so far.
        micro_batch: the micro-batch that runs.
        at: the micro-batch that is on its way to the device, or runs; an error belongs
            to it.
        value: the loss of the micro-batch, as reported.
        is_forward_only: whether there are no backward passes.
    """

    of_micro_batch = ("micro_batch", "at")

    micro_batches: list[WeighedMicroBatch]
    is_whole_window: bool
    closes: bool
    logs: HeldLogs
    returned: Returned = field(default_factory=Returned)
    micro_batch: WeighedMicroBatch | None = None
    at: WeighedMicroBatch | None = None
    value: Tensor | None = None
    is_forward_only: bool = False

    @property
    def is_last(self) -> bool:
        return self.micro_batch is self.micro_batches[-1]

    @property
    def weight(self) -> Weight:
        """The weight of the micro-batch, in the first term."""
        assert self.micro_batch is not None
        return _leading(self.micro_batch)

    @property
    def share(self) -> Weight:
        """The micro-batch's part of the loader batch's weight; of its rows, where
        `training_step` has still to say the weight."""
        assert self.micro_batch is not None
        if self.are_said:
            is_filler = self.micro_batch.is_filler
            return 0 if is_filler else len(self.micro_batch.cut.rows) / self._num_rows
        return quotient(self.weight, self._weight_of_all)

    @property
    def are_said(self) -> bool:
        """Whether `training_step` says the weights."""
        return self.micro_batches[0].is_said

    @cached_property
    def _weight_of_all(self) -> Weight:
        return sum(map(_leading, self.micro_batches))

    @cached_property
    def _num_rows(self) -> int:
        return sum(len(m.cut.rows) for m in self.micro_batches if not m.is_filler)


def _leading(micro_batch: WeighedMicroBatch) -> Weight:
    return next(iter(micro_batch.weights.values()))
