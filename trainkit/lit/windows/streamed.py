"""The driver of streamed windows: each loader batch is a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from trainkit.core.accumulator import Accumulator
from trainkit.core.documents import documents_option
from trainkit.core.gradients import clear_gradients
from trainkit.core.said_weight import Weighed
from trainkit.core.samples import num_samples
from trainkit.core.strategies import AccumulationStrategy, PerSample
from trainkit.core.window import WindowStats
from trainkit.lit.callback.base import WindowOwner
from trainkit.lit.callback.taken_calls import PlainBackward, taken_calls
from trainkit.lit.proof.start import first_batches


class Streamed:
    """Weighs each loader batch right before its `training_step`, as that gets it.

    Args:
        trainer: in `fit`.
        module: what trains.
        windows: the callback that divides windows; its `weight` is set.
    """

    is_split, size, micro_batch_now = False, None, None

    def __init__(self, trainer: Any, module: Any, windows: WindowOwner) -> None:
        self._windows = windows
        self._trainer: Any = trainer
        self._module: Any = module
        self._training_step: Any = trainer.strategy.training_step
        self._backward_with_hooks: Any = trainer.strategy.backward
        self._plain: Any = PlainBackward(trainer, module, windows)
        self._skips_hooks = False
        self._patch = ExitStack()
        self._strategy = windows.strategy
        self._documents = documents_option(windows.cut, *windows.strategies.values())

    def start(self) -> None:
        """Take Lightning's calls, until `stop`."""
        of = self._trainer, self._windows
        mine: dict[str, Any] = {"training_step": self._run}
        if self._module.automatic_optimization:
            mine["backward"] = self._backward
        self._patch.enter_context(taken_calls(*of, **mine))
        first = first_batches(self._trainer, self._module, self._windows)
        self._patch.enter_context(first)

    def stop(self) -> None:
        """Give Lightning's calls back, and hold nothing that has trained."""
        self._patch.close()
        self._training_step = self._module = self._trainer = None
        self._backward_with_hooks = self._plain = None

    # ---- a micro-batch ---------------------------------------------------------------

    def _run(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Weigh the batch and run `training_step`."""
        windows = self._windows
        windows.refuse_changes(self._module)
        strategy = self._strategy
        if isinstance(strategy, Weighed):
            with windows.said.open():
                self._weigh(batch, None)
                output = self._training_step(batch, *args, **kwargs)
                self._take_said(batch, output, strategy)
        else:
            self._weigh(batch, strategy)
            output = self._training_step(batch, *args, **kwargs)
        if windows.inside is not None:
            windows.inside.check_called(batch)
        return output

    def _weigh(self, batch: Any, strategy: AccumulationStrategy | None) -> None:
        """Weigh the batch by a strategy, if one can do that beforehand."""
        windows, is_automatic = self._windows, self._module.automatic_optimization
        if is_automatic:
            windows.weight = None if strategy is None else strategy.weight(batch)
        if windows.must_count_samples:
            counts = type(strategy) is PerSample and strategy.mask is None
            if counts and is_automatic:
                samples = windows.weight
            else:
                samples = num_samples(batch, self._documents)
            for accumulator in windows.accumulators.values():
                accumulator.window.count(samples=samples or 0)

    def _take_said(self, batch: Any, output: Any, strategy: Weighed) -> None:
        """Weigh the batch by what `training_step` has said."""
        said = self._windows.said
        if not self._module.automatic_optimization:
            said.refuse_unused()
        elif output is not None:
            self._windows.weight = said.take(strategy, self._module, batch)

    def _backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run a backward pass, without Lightning's hooks if nobody has them when the
        window begins."""
        windows, accumulator = self._windows, self._windows.accumulators[0]
        if not accumulator.window.is_open:
            self._skips_hooks = self._plain.is_there()
        if not self._skips_hooks:
            return self._backward_with_hooks(loss, *args, **kwargs)
        windows.batch_is_unfinished = True
        self._pass(loss, accumulator.pass_back)
        return loss.detach()

    def weigh(self, loss: Tensor) -> None:
        """Weigh the pass that is about to run."""
        self._pass(loss, self._windows.accumulators[0].weigh)

    def _pass(self, loss: Tensor, weigh: Callable[..., Any]) -> None:
        """Let the accumulator weigh a pass."""
        windows, trainer = self._windows, self._trainer
        if not windows.accumulators[0].window.is_open:
            if not windows.gradients_are_fresh:
                # Lightning zeroes gradients by the batch's index and steps by the
                # number of batches. If accumulate_grad_batches changes, or the loader
                # yields None, the two disagree and the old gradients are still there.
                clear_gradients(trainer.optimizers[0])
        num_expected = trainer.accumulate_grad_batches  # Lightning has divided by it
        value, scaler = loss.detach(), windows.scaler
        if scaler is not None:
            value = value / scaler.scale(loss.new_ones(()))
        assert windows.weight is not None
        how = {"divided_by": num_expected, "expected": num_expected, "value": value}
        weigh(loss, windows.weight, **how)

    def keeps_gradients(self, optimizer: Any) -> bool:
        """Whether gradients survive that Lightning zeroes them: they do not."""
        return False

    # ---- the end of a window ---------------------------------------------------------

    def finish(
        self, accumulator: Accumulator, owners: Any
    ) -> tuple[WindowStats, int | None]:
        """Divide the window of an optimizer or of parameters; returns its numbers, and
        how many loader batches it had on all ranks where these were cut."""
        most = max(self._trainer.accumulate_grad_batches, self._windows.longest_window)
        slots = self._windows.slots_of(most, accumulator)
        return accumulator.finish(owners, slots=slots), None

    def num_torn(self, num_closed: int) -> int:
        """How many micro-batches are in a window whose last one is under way."""
        accumulators = self._windows.accumulators.values()
        return sum(a.num_micro_batches for a in accumulators) or num_closed

    def rows_now(self) -> tuple[int, Sequence[int]] | None:
        """The micro-batch under way and its rows, where a loader batch was cut."""
        return None
