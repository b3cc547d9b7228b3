"""The forward and backward passes of a loader batch's micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor

from trainkit.core._compat import owe_forward_messages, send_forward_messages
from trainkit.core.said_weight import Weighed
from trainkit.lit.aside import Kept
from trainkit.lit.callback.base import WindowOwner
from trainkit.lit.callback.taken_calls import PlainBackward
from trainkit.lit.split.arriving import Transfer
from trainkit.lit.split.logs import HeldLogs
from trainkit.lit.split.micro_batches import CutBatch
from trainkit.lit.split.outputs import taken_apart
from trainkit.lit.split.pools import num_cuts
from trainkit.lit.split.refusals import refuse_several_terms

NOTHING = nullcontext()


class Passes:
    """Runs the forward and backward passes of micro-batches, one after another.

    Args:
        trainer: in `fit`.
        pl_module: the module that trains.
        windows: the callback that divides the windows.
        logs: hold what micro-batches log.
        may_repeat: whether windows run again where memory runs out.

    Attributes:
        transfer: brings micro-batches to the device.
        is_apart: whether gradients stay on their ranks in all passes of a window, so
            that ranks may run different numbers of micro-batches, and windows again.
    """

    def __init__(
        self,
        trainer: Any,
        pl_module: Any,
        windows: WindowOwner,
        logs: HeldLogs,
        *,
        may_repeat: bool,
    ) -> None:
        self._trainer, self._module, self._windows = trainer, pl_module, windows
        self._logs, self._accumulator = logs, windows.accumulators[0]
        self.transfer = Transfer(trainer, pl_module, may_repeat=may_repeat)
        self._ranks = self._accumulator.ranks
        self._has_ranks = self._ranks.backend_sums
        self.is_apart = may_repeat and self._has_ranks
        self._block = getattr(trainer.strategy, "block_backward_sync", nullcontext)
        self._training_step = trainer.strategy.training_step
        self._backward = trainer.strategy.backward
        self._plain = PlainBackward(trainer, pl_module, windows)

    def announce(self, current: CutBatch) -> None:
        """Tell the accumulator what comes, so that ranks begin to exchange it."""
        accumulator = self._accumulator
        size = num_cuts(self._trainer, self._windows.cut)
        if current.is_told:
            accumulator.tell(current.weights)
        else:
            refuse_several_terms(accumulator.strategies, size)
            first = current.leading[0]
            if current.are_said:
                first = len(current.parts[0].rows)
            # Where the weight is said later, the first backward pass does this. But a
            # rank whose memory runs out would not come there.
            if self.is_apart or not current.are_said:
                device = self._trainer.strategy.root_device
                accumulator.division.agree(first, size * len(current.parts), device)
        accumulator.window.count(**current.counts())

    def run(self, current: CutBatch, args: Any, kwargs: Any) -> None:
        """Run all micro-batches of a loader batch, with these further arguments of
        `training_step`."""
        self._skips_hooks = self._plain.is_there()
        for batch in self.transfer.each(current):
            undone = block = said = NOTHING
            is_filler = current.is_filler
            if is_filler:
                undone = Kept(self._module, generators=False)
            if current.are_said:  # training_step may say what its loss weighs
                said = self._windows.said.open()
            # The ranks' gradients meet in the backward pass of the last micro-batch.
            is_last = current.index + 1 == len(current.parts)
            if self._has_ranks and not self.is_apart and not is_last:
                block = self._block()
            with undone, block, said:
                output = self._training_step(batch, *args, **kwargs)
                self._take(current, batch, output, is_filler=is_filler)

    def _take(
        self, current: CutBatch, batch: Any, output: Any, *, is_filler: bool
    ) -> None:
        """Take what the forward pass of a micro-batch has returned, and run its
        backward pass."""
        accumulator, strategies = self._accumulator, self._accumulator.strategies
        if current.are_said and not is_filler:
            ((term, strategy),) = strategies.items()
            assert isinstance(strategy, Weighed)
            is_nothing, said = output is None, self._windows.said
            weight = 0 if is_nothing else said.take(strategy, self._module, batch)
            current.weights[term][current.index] = weight
        if output is None:
            current.num_nothing += 1
            return
        terms, extras = taken_apart(output, strategies)
        values = {name: _value_of(term) for name, term in terms.items()}
        if not is_filler:
            self._logs.know_terms(terms, strategies)
            current.add(values, extras)
        if current.is_forward_only:
            return
        if len(terms) > 1:
            loss = accumulator.join(terms)
            current.value = _value_of(loss)
        else:
            ((name, loss),) = terms.items()
            current.value = values[name]
        if is_filler:
            loss = loss * 0  # the weight 0 has no effect on a sum
        if self._skips_hooks:
            self._windows.batch_is_unfinished = True
            self._pass(current, loss, accumulator.pass_back)
        else:
            self._backward(loss, self._trainer.optimizers[0])

    def weigh(self, current: CutBatch, loss: Tensor) -> None:
        """Weigh the loss, after a gradient scaler, before its backward pass."""
        self._pass(current, loss, self._accumulator.weigh)

    def _pass(self, current: CutBatch, loss: Tensor, weigh: Callable[..., Any]) -> None:
        weight = None if current.is_told else current.leading[current.index]
        size = num_cuts(self._trainer, self._windows.cut)
        expected = size * len(current.parts)
        assert current.value is not None
        weigh(loss, weight, value=current.value, expected=expected)

    def slots(self) -> int:
        """How many single weights of each rank a closing window has room for."""
        if not self._windows.slots_of(1):
            return 0  # else the host would wait for the other ranks' numbers
        accumulator = self._accumulator
        if accumulator.told is not None:
            return accumulator.told.most_micro_batches()
        # Ranks do not know each other's numbers, and must ask for as many.
        return accumulator.num_micro_batches * (accumulator.ranks.size == 1)

    @contextmanager
    def apart(self, *, closes: bool) -> Iterator[None]:
        """A context in which no forward or backward pass of DDP waits for other ranks;
        `closes`: whether the window closes in it."""
        ddp = self._ranks.ddp
        if ddp is not None and not self._accumulator.is_open:
            send_forward_messages(ddp)
        with self._block():
            yield
        if ddp is not None and closes:
            owe_forward_messages(ddp)


def _value_of(loss: Tensor) -> Tensor:
    """A loss to report; on a GPU the next step of a CUDA graph overwrites it."""
    value = loss.detach()
    return value.clone() if value.is_cuda else value
