"""The driver of streamed windows: each loader batch is a micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from trainkit.core.accumulator import Accumulator
from trainkit.core.documents import documents_option
from trainkit.core.gradients import clear_gradients
from trainkit.core.said_weight import Weighed
from trainkit.core.strategies import checked_weight, num_samples
from trainkit.core.terms import ONE
from trainkit.core.window import WindowStats
from trainkit.lit._compat import hands_on_arguments
from trainkit.lit.callback.base import WindowOwner
from trainkit.lit.callback.said_weight import counts_rows


class Streamed:
    """Weighs each loader batch right before its `training_step`, as that gets it.

    Args:
        trainer: in `fit`.
        module: what trains.
        windows: the callback that divides windows; its `weight` is set.
    """

    is_split, size, rows_now = False, None, None

    def __init__(self, trainer: Any, module: Any, windows: WindowOwner) -> None:
        self._trainer: Any = trainer
        self._module: Any = module
        self._windows = windows
        self._is_automatic: bool = module.automatic_optimization
        self._training_step: Any = trainer.strategy.training_step
        self._plain_backward: Any = trainer.strategy.backward
        self._hands_on = hands_on_arguments(trainer, module)
        self._strategy = strategy = windows.strategy
        self._weighs_samples = counts_rows(strategy)
        self._documents = documents_option(windows.cut, *windows.strategies.values())

    def calls(self) -> dict[str, Callable[..., Any]]:
        """What takes the place of Lightning's calls while `fit` runs."""
        own = {"backward": self._backward} if self._is_automatic else {}
        return {"training_step": self._run, **own}

    def stop(self) -> None:
        """Hold nothing that has trained."""
        self._training_step = self._plain_backward = None
        self._module = self._trainer = None

    # ---- a micro-batch ---------------------------------------------------------------

    def _run(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Weigh the batch and run `training_step`."""
        windows, strategy, said = self._windows, self._strategy, self._windows.said
        is_weighed_later = isinstance(strategy, Weighed)
        if self._is_automatic:
            windows.weight = None if is_weighed_later else strategy.weight(batch)
        if windows.counts_samples:
            self._count_samples(batch)
        if not is_weighed_later:
            output = self._training_step(batch, *args, **kwargs)
        else:
            with said.open():
                output = self._training_step(batch, *args, **kwargs)
                if not self._is_automatic:
                    said.refuse_unused()
                elif output is not None:
                    windows.weight = said.take(strategy, self._module, batch)
        if windows.inside is not None and not windows.inside.is_checked:
            windows.inside.check_called(batch)
        return output

    def _count_samples(self, batch: Any) -> None:
        if self._weighs_samples and self._is_automatic:
            samples = self._windows.weight
        else:
            samples = num_samples(batch, self._documents)
        for accumulator in self._windows.accumulators.values():
            accumulator.window.count(samples=samples or 0)

    def _backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Weigh the pass that Lightning is about to run, with its hooks."""
        windows, trainer = self._windows, self._trainer
        accumulator = windows.accumulators[0]
        if not accumulator.window.is_open and not windows.gradients_are_fresh:
            # Lightning zeroes gradients by the batch's index and steps by the number of
            # batches. If accumulate_grad_batches changes, or the loader yields None,
            # the two disagree and the old gradients are still there.
            clear_gradients(trainer.optimizers[0])
        windows.batch_is_unfinished = True
        number = trainer.accumulate_grad_batches  # Lightning has divided by it
        if number == 1 and accumulator.ranks.size == 1 and not accumulator.is_open:
            # Its total is known: the step is plain Lightning's, whatever hooks see.
            accumulator.tell({ONE: [checked_weight(windows.weight)]})
        how = {"divided_by": number, "expected": number, "value": loss.detach()}
        if self._hands_on and "backward" not in vars(self._module):
            kwargs |= accumulator.seed(loss, windows.weight, **how)
        else:
            accumulator.weigh(loss, windows.weight, **how)
        return self._plain_backward(loss, *args, **kwargs)

    def keeps_gradients(self) -> bool:
        """Whether gradients survive that Lightning zeroes them: they do not."""
        return False

    # ---- the end of a window ---------------------------------------------------------

    def finish(self, accumulator: Accumulator, owners: Any) -> WindowStats:
        """Divide the window of an optimizer or of parameters."""
        return accumulator.finish(owners)
