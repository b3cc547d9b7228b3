"""A loader batch that runs again in smaller micro-batches when memory runs out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from trainkit.core._compat import owe_forward_messages, send_forward_messages
from trainkit.core.accumulator import Accumulator
from trainkit.core.out_of_memory import is_out_of_memory, release
from trainkit.lit._compat import as_hook, current_hook
from trainkit.lit.aside import Kept
from trainkit.lit.split import refusals
from trainkit.lit.split.current_window import CurrentWindow
from trainkit.lit.split.gradients import KeptGradients
from trainkit.lit.split.sizes import AutoSizes, Failure, FixedSizes


class Retry:
    """Runs a loader batch until it fits in memory, on all ranks.

    Before each new attempt everything is put back: the gradients and totals of the
    window, the module's state, random generators, and what was logged.

    Args:
        module: the module that trains.
        accumulator: holds the open window.
        sizes: takes a smaller size after a failure, or refuses.
        parameters: returns what holds the window's gradients.
        current: returns the loader batch that is being run, if it has been cut.
        forget: drops what the attempt has collected.
    """

    def __init__(
        self,
        module: Any,
        accumulator: Accumulator,
        sizes: FixedSizes | AutoSizes,
        *,
        parameters: Callable[[], list[Tensor]],
        current: Callable[[], CurrentWindow | None],
        forget: Callable[[], None],
    ) -> None:
        self._module = module
        self._accumulator = accumulator
        self._sizes = sizes
        self._parameters = parameters
        self._current = current
        self._forget = forget

    def run(self, attempt: Callable[[], None]) -> None:
        """Call `attempt` until it has succeeded on every rank."""
        ddp = self._accumulator.ranks.ddp
        if ddp is not None and not self._accumulator.is_open:
            send_forward_messages(ddp)
        gradients = KeptGradients(self._parameters())
        snapshot = Kept(self._module, device=self._module.device)
        mark = self._accumulator.window.copy()
        while self._sizes.failed_anywhere(self._failure_of(attempt)):
            self._accumulator.rewind(mark)
            gradients.restore()
            self._forget()
            snapshot.restore()
        current = self._current()
        assert current is not None
        if ddp is not None and current.closes:
            owe_forward_messages(ddp)

    def _failure_of(self, attempt: Callable[[], None]) -> Failure | None:
        """Run one attempt; returns the failure if memory runs out."""
        try:
            # After an error Lightning would keep the hook's name.
            with as_hook(self._module, current_hook(self._module)):
                attempt()
        except Exception as error:
            current = self._current()
            if current is None or not is_out_of_memory(error):
                raise  # not cut yet, or not about memory
            if self._accumulator.ranks.backend_sums and self._sizes.is_proven():
                # They may be waiting inside this window's backward passes.
                raise refusals.out_of_memory_between_ranks() from error
            micro_batch = (current.at or current.micro_batches[0]).cut
            failure = Failure(
                micro_batch.padded, len(micro_batch.rows), type(error).__name__
            )
            release(error)
            self._forget()
            return failure
        return None
