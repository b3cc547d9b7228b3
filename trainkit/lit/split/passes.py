"""The forward and backward passes of a loader batch's micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor

from trainkit.core._compat import owe_forward_messages, send_forward_messages
from trainkit.core.accumulator import Accumulator
from trainkit.core.joins.steps import JoinedSteps
from trainkit.core.joins.turns import Turns
from trainkit.core.terms import terms_of
from trainkit.core.weighed import Weighed
from trainkit.lit._compat import replaced, transfers_plainly
from trainkit.lit.aside import Kept
from trainkit.lit.callback.base import WindowOwner
from trainkit.lit.callback.moved_state import MovedState
from trainkit.lit.callback.said_weight import LeftInTurns, left_for_counting
from trainkit.lit.split import refusals
from trainkit.lit.split.arriving import Arrivals
from trainkit.lit.split.current_window import CurrentWindow
from trainkit.lit.split.micro_batches import WeighedMicroBatch
from trainkit.lit.split.outputs import taken_apart
from trainkit.lit.split.shortcuts import backward_of, transfer_of
from trainkit.lit.split.sizes import AutoSizes, FixedSizes
from trainkit.lit.split.transfer import moved
from trainkit.lit.split.window_metrics import WindowMetrics

NOTHING = nullcontext()


class Passes:
    """Runs the forward and backward passes of micro-batches, one after another.

    With `joined`, the steps of all micro-batches run in turns, and wait for each other
    where they call a module with BatchNorm.

    Args:
        trainer: in `fit`.
        pl_module: the module that trains.
        windows: the callback that divides the windows.
        sizes: the limit for the next window's micro-batches.
        metrics: the module's metric objects.

    Attributes:
        is_apart: whether the gradients of the window are still on their ranks.
        arrivals: weighs micro-batches on the device, if hooks may change them there.
        transfer: brings a micro-batch to the device.
        joined: lets BatchNorm see the whole window, if somebody asks for it.
    """

    def __init__(
        self,
        trainer: Any,
        pl_module: Any,
        windows: WindowOwner,
        sizes: FixedSizes | AutoSizes,
        metrics: WindowMetrics,
    ) -> None:
        accumulator: Accumulator = windows.accumulators[0]
        self.is_apart = False
        self.joined: JoinedSteps | None = None
        self.transfer = transfer_of(trainer, pl_module, may_repeat=sizes.catches)
        is_plain = transfers_plainly(trainer, pl_module)
        self.arrivals = None if is_plain else Arrivals(accumulator)
        self._trainer, self._module, self._windows = trainer, pl_module, windows
        self._accumulator, self._sizes, self._metrics = accumulator, sizes, metrics
        left = left_for_counting(accumulator.strategies)
        self._moved_state = MovedState(pl_module, left_out=left)
        self._several_ranks = accumulator.ranks.backend_sums
        self._strategy = trainer.strategy
        self._training_step = trainer.strategy.training_step
        self._backward = backward_of(trainer, pl_module, windows)

    def run(self, current: CurrentWindow, size: int, args: Any, kwargs: Any) -> None:
        """Run all micro-batches of a loader batch.

        Args:
            current: the loader batch.
            size: how many loader batches make a window.
            args: further arguments of `training_step`.
            kwargs: further keyword arguments of `training_step`.
        """
        if self.joined is not None:
            self._run_joined(self.joined, current, args, kwargs)
            return
        several = len(current.micro_batches) > 1
        each_moved = zip(current.micro_batches, self._moved(current), strict=True)
        for micro_batch, on_device in each_moved:
            self._begin(current, micro_batch, on_device)
            is_first = micro_batch is current.micro_batches[0]
            is_looked_at = is_first and (several or size > 1)
            is_looked_at = is_looked_at and not self._windows.is_measured
            is_filler = micro_batch.is_filler
            undone = Kept(self._module, generators=False) if is_filler else NOTHING
            said = self._windows.said.open()
            with undone, self._apart_unless_last(current), said:
                with self._moved_state.watch() if is_looked_at else NOTHING:
                    output = self._training_step(on_device, *args, **kwargs)
                self._take(current, on_device, output)

    def _run_joined(
        self,
        joined: JoinedSteps,
        current: CurrentWindow,
        args: Any,
        kwargs: Any,
    ) -> None:
        """Run all micro-batches in turns."""
        on_device = self._moved(current)
        arrived: dict[int, Any] = {}

        def step(index: int) -> Any:
            arrived[index] = next(on_device)
            micro_batch = current.micro_batches[index]
            self._begin(current, micro_batch, arrived[index])
            is_looked_at = index == 0 and len(current.micro_batches) > 1
            with self._moved_state.watch() if is_looked_at else NOTHING:
                return self._training_step(arrived[index], *args, **kwargs)

        steps = [partial(step, index) for index in range(len(current.micro_batches))]
        said = self._windows.said
        turns = Turns([current, current.logs, said, self._metrics])
        left = LeftInTurns(self._module, self._accumulator.strategies)

        def switched(index: int) -> None:
            left.turn(index)
            turns(index)

        with said.open(), self._apart():
            results = joined.run(steps, switched)
            for index, output in enumerate(results):
                last = index + 1 == len(steps)
                after = joined.backward if last else None
                self._take(current, arrived.pop(index), output, after)

    def _begin(
        self, current: CurrentWindow, micro_batch: WeighedMicroBatch, on_device: Any
    ) -> None:
        """Begin a micro-batch."""
        current.micro_batch = current.at = micro_batch
        weights, counts = micro_batch.weights, not micro_batch.is_filler
        if self.arrivals is not None and counts:
            self.arrivals.check(weights, on_device)
        current.logs.begin(on_device, weights, is_muted=not counts)
        by_rows = len(current.micro_batches) > 1 and current.are_said
        self._metrics.begin(current.share, by_rows=by_rows)

    def _moved(self, current: CurrentWindow) -> Iterator[Any]:
        coming = iter(current.micro_batches)

        def move(batch: Any) -> Any:
            current.at = next(coming)
            try:
                return self.transfer(batch)
            except StopIteration as error:
                raise refusals.stop_iteration("a hook of the transfer") from error

        batches = [micro_batch.cut.batch for micro_batch in current.micro_batches]
        return moved(batches, move, self._strategy.root_device)

    def _apart_unless_last(self, current: CurrentWindow) -> AbstractContextManager[Any]:
        """The ranks' gradients meet in the backward pass of the last micro-batch, if
        nothing in the window can fail on one rank alone."""
        if not self._several_ranks:
            return NOTHING
        if current.is_last:
            self.is_apart = not self._sizes.is_proven()
            if not self.is_apart:
                return NOTHING
        return getattr(self._strategy, "block_backward_sync", nullcontext)()

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Gradients stay on their ranks, which may run different numbers of
        micro-batches: no forward or backward pass of DDP waits for other ranks."""
        self.is_apart = self._several_ranks
        if not self._several_ranks:
            yield
            return
        ddp = self._accumulator.ranks.ddp
        if ddp is not None:
            send_forward_messages(ddp)
        with getattr(self._strategy, "block_backward_sync", nullcontext)():
            yield
        if ddp is not None:
            owe_forward_messages(ddp)

    def _take(
        self,
        current: CurrentWindow,
        batch: Any,
        output: Any,
        after: Callable[[], None] | None = None,
    ) -> None:
        """Run the backward pass of the micro-batch whose forward pass has run.

        Args:
            current: the loader batch.
            batch: the micro-batch as `training_step` got it.
            output: of `training_step`.
            after: completes the backward pass.
        """
        assert current.micro_batch is not None
        if current.micro_batch.is_said:
            self._take_said(current, batch, output)
        if output is None:
            current.returned.add_nothing()
            return
        loss, extras = taken_apart(output)
        name, strategies = "training_step's loss", self._accumulator.strategies
        terms = terms_of(loss, strategies, name=name)
        if not current.micro_batch.is_filler:
            current.returned.add(output, terms, extras)
        current.logs.know_terms(terms, self._accumulator.strategies)
        if current.is_forward_only:
            return
        if len(self._accumulator.strategies) > 1:
            loss = self._accumulator.join(loss)
        else:
            (loss,) = terms.values()
        assert isinstance(loss, Tensor)
        if current.micro_batch.is_filler:
            loss = loss * 0  # the weight 0 has no effect on a sum
        # On a GPU the next step of a CUDA graph overwrites this step's loss.
        current.value = loss.detach().clone() if loss.is_cuda else loss.detach()
        if self.joined is None:
            self._backward(loss, self._trainer.optimizers[0])
        else:
            self._backward_joined(self.joined, loss, after)

    def _backward_joined(
        self, joined: JoinedSteps, loss: Tensor, after: Callable[[], None] | None
    ) -> None:
        """Run a backward pass down to where all micro-batches wait; the last one then
        completes those of all, before any hook sees the gradients."""
        own = self._module.backward

        def backward(*args: Any, **kwargs: Any) -> None:
            own(*args, **kwargs)
            if after is not None:
                after()

        options = {"retain_graph": True} if joined.needs_graph else {}
        refusals.refuse_backward_without(options, self._module)
        with replaced(self._module, backward=backward):
            self._backward(loss, self._trainer.optimizers[0], **options)

    def _take_said(self, current: CurrentWindow, batch: Any, output: Any) -> None:
        """Weigh the micro-batch by what `training_step` has said."""
        ((term, strategy),) = self._accumulator.strategies.items()
        assert isinstance(strategy, Weighed)
        assert current.micro_batch is not None
        weights, said = current.micro_batch.weights, self._windows.said
        is_nothing = output is None
        weights[term] = 0 if is_nothing else said.take(strategy, self._module, batch)
        current.logs.know_weights()
