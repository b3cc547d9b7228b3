"""Weigh each loader batch of a streamed window right before its `training_step`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from trainkit.core.batches import num_samples
from trainkit.core.weighed import Weighed
from trainkit.lit.batch_size.unlike import Unlike, counts_alike
from trainkit.lit.callback.base import WindowOwner
from trainkit.lit.callback.said_weight import left_for_counting
from trainkit.lit.callback.table import say
from trainkit.lit.proof.first_batch import first_batches
from trainkit.lit.windows.moved_state import MovedState
from trainkit.lit.windows.taken_calls import taken_calls


@contextmanager
def streamed_steps(
    trainer: Any, pl_module: Any, windows: WindowOwner
) -> Iterator[None]:
    """Weigh each batch as `training_step` gets it.

    Args:
        trainer: in `fit`.
        pl_module: what trains.
        windows: the callback that divides windows; its `weight` is set.
    """
    steps = _Steps(trainer, pl_module, windows)
    with (
        taken_calls(trainer, windows, training_step=steps.run),
        first_batches(trainer, pl_module, windows),
    ):
        yield
    steps.say_unlike()


class _Steps:
    def __init__(self, trainer: Any, pl_module: Any, windows: WindowOwner) -> None:
        self._trainer = trainer
        self._module = pl_module
        self._windows = windows
        self._training_step: Callable[..., Any] = trainer.strategy.training_step
        left = left_for_counting(windows.strategies)
        self._moved = MovedState(pl_module, left_out=left)
        self._unlike = Unlike()

    def run(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Weigh the batch and run `training_step`."""
        with self._watched(), self._windows.said.open():
            self._weigh(batch)
            output = self._training_step(batch, *args, **kwargs)
            self._take_said(batch, output)
        if self._windows.inside is not None:
            self._windows.inside.check_called(batch)
        return output

    def _watched(self) -> AbstractContextManager[Any]:
        """A context that detects state moved by the first of several micro-batches."""
        if self._trainer.accumulate_grad_batches == 1 or self._windows.is_measured:
            return nullcontext()
        for accumulator in self._windows.accumulators.values():
            if accumulator.is_open:
                return nullcontext()
        return self._moved.watch()

    def _weigh(self, batch: Any) -> None:
        windows = self._windows
        windows.follow(self._module)
        if self._module.automatic_optimization:
            is_said = isinstance(windows.strategy, Weighed)
            windows.weight = None if is_said else windows.strategy.weight(batch)
        if windows.must_count_samples:
            for accumulator in windows.accumulators.values():
                accumulator.window.count(samples=num_samples(batch))
        if windows.has_strategy and counts_alike(windows.strategies):
            self._unlike.record(batch)
            if windows.first_windows.is_complete:
                self.say_unlike()

    def _take_said(self, batch: Any, output: Any) -> None:
        """Weigh the batch by what `training_step` has said."""
        windows, strategy = self._windows, self._windows.strategy
        if not self._module.automatic_optimization:
            windows.said.refuse_unused()
        elif isinstance(strategy, Weighed) and output is not None:
            windows.weight = windows.said.take(strategy, self._module, batch)

    def say_unlike(self) -> None:
        """Show how unlike the first micro-batches were that counted alike."""
        row = self._unlike.row()
        if row is not None and self._trainer.is_global_zero:
            say(self._trainer, row)
