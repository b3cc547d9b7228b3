"""The driver of split windows: a loader batch is a window of several micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainkit.core._compat import owe_forward_messages, send_forward_messages
from trainkit.core.accumulator import Accumulator
from trainkit.core.gradients import parameters_of
from trainkit.core.said_weight import Weighed
from trainkit.core.split.cutting import MicroBatch
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.window import WindowStats
from trainkit.errors import TrainkitError
from trainkit.lit._compat import skips_backward
from trainkit.lit.aside import Kept
from trainkit.lit.callback.base import (
    OrderedCallback,
    WindowOwner,
    is_rehearsal,
    say_dropped,
    window_ends,
)
from trainkit.lit.split import refusals
from trainkit.lit.split.arriving import Transfer
from trainkit.lit.split.auto import AutoSizes, Hosts
from trainkit.lit.split.logs import HeldLogs, WindowMetrics
from trainkit.lit.split.micro_batches import CutBatch, MicroBatches
from trainkit.lit.split.outputs import as_one, taken_apart, value_of
from trainkit.lit.split.pools import Pools, num_cuts

KEPT = ("num_loader_batches", "sizes", "trims", "_options")
"""The attributes that stay after training."""

KEY = "trainkit_micro_batching"
"""The size that was found, in a checkpoint."""

NOTHING = nullcontext()


class Split:
    """The driver of split windows: cuts each loader batch, and runs its micro-batches
    in one step.

    Three methods of Lightning's strategy object are replaced while `fit` runs. The
    loader batch stays whole, on the host, for Lightning and all callbacks. In place of
    `training_step`, forward and backward passes of every micro-batch run through
    Lightning's own methods, so that all hooks, precisions and backends take part. The
    gradients are set aside while Lightning zeroes them, between forward and backward,
    and are put back in place of the backward pass.

    Args:
        trainer: in `fit`.
        pl_module: the module that trains.
        options: how to cut.
        windows: the callback that divides the windows.
        pools: hold the loader batches that wait for others.
        found: the size that an earlier run has found, as `state_dict` gives it.

    Attributes:
        sizes: find the limit for micro-batches, for `"auto"`.
        current: the loader batch that is being run, if one is.
        num_loader_batches: how many loader batches the open window has on this rank.
        trims: whether columns that are only padding are left out; None until the first
            batch that has some.
    """

    is_split = True

    def __init__(
        self,
        trainer: Any,
        pl_module: Any,
        options: MicroBatching,
        windows: WindowOwner,
        pools: Pools,
        found: Mapping[str, Any] | None = None,
    ) -> None:
        self._trainer, self._module = trainer, pl_module
        self._options, self._windows, self._pools = options, windows, pools
        self._accumulator = accumulator = windows.accumulators[0]
        self._ranks, strategies = accumulator.ranks, accumulator.strategies
        refusals.refuse_before_training(trainer, pl_module, options, strategies)
        run_alike = refusals.communicates_in_forward(pl_module, self._ranks)
        self.sizes: AutoSizes | None = None
        if is_auto := options.is_auto:
            refusals.refuse_auto(trainer, self._ranks, run_alike=run_alike)
            device = trainer.strategy.root_device
            self.sizes = AutoSizes(options.start, found, Hosts(self._ranks), device)
        # In windows that may run again gradients stay on their ranks in all passes.
        self._is_apart = is_auto and self._ranks.backend_sums
        self.current: CutBatch | None = None
        self.num_loader_batches = 0
        may_trim = True if is_rehearsal(trainer) else None
        self.trims: bool | None = may_trim if options.trim else False
        self._logs = HeldLogs(pl_module)
        self._metrics = WindowMetrics(pl_module, self._ranks.size)
        self._transfer = Transfer(trainer, pl_module, may_repeat=is_auto)
        of = options, trainer, strategies, self.sizes
        hosts = Hosts(self._ranks) if run_alike else None
        weighs = self._transfer.is_plain
        self._micro_batches = MicroBatches(*of, hosts, weighs=weighs)
        self._plain: Any = trainer.strategy.training_step, trainer.strategy.backward
        self._batch_to_device = trainer.strategy.batch_to_device
        self._block = getattr(trainer.strategy, "block_backward_sync", nullcontext)
        self._own: list[Tensor] = []
        self._stash: list[tuple[Tensor, Tensor | None]] = []
        self._is_complete = False

    # ---- what the callback asks ------------------------------------------------------

    @property
    def size(self) -> int | None:
        """The size limit of a micro-batch, if it is to be found."""
        return None if self.sizes is None else self.sizes.shown

    @property
    def fills_up(self) -> bool:
        """Whether the present micro-batch only lets all ranks run equally many."""
        return self.current is not None and self.current.is_filler

    @property
    def rows_now(self) -> tuple[int, Sequence[int]] | None:
        """The number of the micro-batch under way, and its rows."""
        current = self.current
        if current is None:
            return None
        return current.index, current.parts[current.index].rows

    def num_torn(self, num_closed: int) -> int:
        """How many loader batches are in the window of the one under way; a pool is
        run again as one, since those that wait are saved."""
        return self.num_loader_batches if self._options.pool is None else 1

    def state_dict(self) -> dict[str, Any] | None:
        """The size that was found, for a checkpoint."""
        return None if self.sizes is None else self.sizes.search.state_dict()

    def has_padding(self, batch: Any) -> bool | None:
        """Whether some rows of a loader batch have columns that only pad; None if
        nothing tells their lengths."""
        try:
            return self._micro_batches.cutter.has_padding(batch)
        except TrainkitError:  # a hook may add what is missing before it is cut
            return False

    def is_one_micro_batch(self, batch: Any) -> bool:
        """Whether a size was asked for, and a loader batch has no more rows."""
        size = self._options.size
        try:
            rows = self._micro_batches.cutter.measure(batch)
        except TrainkitError:
            return False
        return isinstance(size, int) and rows.num_rows <= size

    # ---- Lightning's strategy object -------------------------------------------------

    def calls(self) -> dict[str, Callable[..., Any]]:
        """What takes the place of Lightning's calls while `fit` runs."""
        return {
            "batch_to_device": self._leave_on_host,
            "training_step": self._run,
            "backward": self._end_backward,
        }

    def stop(self) -> None:
        """Hold nothing that has trained; only the attributes in `KEPT` stay."""
        kept = {name: it for name, it in vars(self).items() if name in KEPT}
        vars(self).clear()
        vars(self).update(kept, current=None)

    def _leave_on_host(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if self._trainer.training:
            return batch
        return self._batch_to_device(batch, *args, **kwargs)

    def keeps_gradients(self) -> bool:
        """Whether the window is open: its gradients are then put away, before Lightning
        zeroes them."""
        if not self._accumulator.window.is_open:
            return False
        for parameter in self._own:
            self._stash.append((parameter, parameter.grad))
            parameter.grad = None
        return True

    def _end_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        stash, self._stash = self._stash, []
        for parameter, gradient in stash:
            parameter.grad = gradient
        return loss

    # ---- a window --------------------------------------------------------------------

    def _run(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a loader batch in place of `training_step`."""
        trainer, accumulator = self._trainer, self._accumulator
        self._drop_unstepped()
        self._own = parameters_of(trainer.optimizers[0])
        if not accumulator.window.is_open:
            self.num_loader_batches = 0
            for parameter in self._own:
                parameter.grad = None
        is_forward_only = skips_backward(trainer)
        self.num_loader_batches += not is_forward_only
        size = trainer.accumulate_grad_batches
        closes = window_ends(trainer, trainer.fit_loop.batch_idx, size)
        if self._options.pool is not None and not is_forward_only:
            if not closes:
                self._pools.waiting.append(batch)
                # Lightning takes None for a mistake on several ranks.
                return torch.zeros((), device=trainer.strategy.root_device)
            pool = [*self._pools.waiting, batch]
            self.num_loader_batches = len(pool)
            batch = self._micro_batches.cutter.join(pool)
        attempt = partial(self._attempt, batch, args, kwargs, is_forward_only)
        apart = self._apart(closes=closes) if self._is_apart else NOTHING
        try:
            with self._logs.taken(trainer.callbacks), apart:
                if is_forward_only or self.sizes is None:
                    attempt()
                else:
                    wide = accumulator.gradients.wide
                    held = self._own if wide is None else [*self._own, *wide.stand_ins]
                    self.sizes.run(
                        attempt, self._module, accumulator, held, self._forget
                    )
            self._is_complete = closes
            found = self._end()
            self._pools.waiting = []
            return found
        finally:
            self.current = None
            self._metrics.close()

    def _drop_unstepped(self) -> None:
        """Drop a complete window whose step the module's `optimizer_step` has left out;
        Lightning zeroes its gradients now."""
        is_complete, self._is_complete = self._is_complete, False
        if not self._accumulator.window.is_open:
            return
        if is_complete or num_cuts(self._trainer, self._options) == 1:
            held = self._accumulator.drop()
            if self._ranks.index == 0:
                say_dropped(held)

    def _attempt(
        self, batch: Any, args: Any, kwargs: Any, is_forward_only: bool
    ) -> None:
        """Cut a loader batch, and run all its micro-batches."""
        trim = bool(self.trims) or self._options.shapes is not None
        current = self._micro_batches.of(batch, trim=trim)
        self.current, current.is_forward_only = current, is_forward_only
        trainer = self._trainer
        if trainer.fit_loop.batch_idx < trainer.accumulate_grad_batches:
            self._metrics.find()
        self._metrics.open(current)
        self._logs.open(current)
        try:
            try:
                if not self._transfer.is_plain and not current.are_said:
                    arrived = self._transfer.arrive(current)
                    current.weigh(self._accumulator.strategies, arrived)
            finally:  # in it ranks exchange, also one whose memory has run out
                if not is_forward_only:
                    self._announce(current)
            for part in self._transfer.each(current):
                self._pass(current, part, args, kwargs)
        except StopIteration as error:
            raise refusals.stop_iteration("training_step") from error
        except Exception as error:
            refusals.add_note(error, batch, current)
            raise

    def _announce(self, current: CutBatch) -> None:
        """Tell the accumulator and other callbacks what comes, so that ranks begin to
        exchange it."""
        accumulator = self._accumulator
        if current.is_told:
            accumulator.tell(current.weights)
        else:
            number = num_cuts(self._trainer, self._options)
            refusals.refuse_several_terms(accumulator.strategies, number)
            first = current.leading[0]
            if current.are_said:
                first = len(current.parts[0].rows)
            # Where the weight is said later, the first backward pass does this. But a
            # rank whose memory runs out would not come there.
            if self._is_apart or not current.are_said:
                device = self._trainer.strategy.root_device
                accumulator.division.agree(first, current.num_expected, device)
        accumulator.window.count(**current.counts())
        for callback in self._trainer.callbacks:
            if isinstance(callback, OrderedCallback):
                callback.on_cut(current.num_counting)

    def _forget(self) -> MicroBatch | None:
        """Drop what was collected in a pass in which memory ran out, on some rank;
        returns the micro-batch that was under way."""
        current, self.current = self.current, None
        self._metrics.close()
        self._windows.forget_means()
        return None if current is None else current.parts[current.index]

    def _end(self) -> Any:
        """Combine the logs and outputs of the micro-batches into one batch's."""
        assert self.current is not None
        self._metrics.close()
        found = as_one(self.current, self._accumulator.strategies)
        self._logs.close()
        if found is None and num_cuts(self._trainer, self._options) == 1:
            self._accumulator.drop()  # else others of the window follow
        return found

    def finish(
        self, accumulator: Accumulator, owners: Any
    ) -> tuple[WindowStats, int | None]:
        """Divide the window of an optimizer or of parameters; returns its numbers, and
        how many loader batches it had on all ranks."""
        slots = 0
        if self._windows.slots_of(1):  # else the host would wait for the other ranks
            if accumulator.told is not None:
                slots = accumulator.told.most_micro_batches()
            elif self._ranks.size == 1:  # else ranks do not know each other's numbers
                slots = accumulator.num_micro_batches
        stats = accumulator.finish(owners, slots=slots, is_apart=self._is_apart)
        return stats, self.num_loader_batches * self._ranks.size

    # ---- a micro-batch ---------------------------------------------------------------

    def _pass(self, current: CutBatch, batch: Any, args: Any, kwargs: Any) -> None:
        """Run a micro-batch forward and backward, with these further arguments of
        `training_step`."""
        undone = block = said = NOTHING
        if is_filler := current.is_filler:
            undone = Kept(self._module, generators=False)
        if current.are_said:  # training_step may say what its loss weighs
            said = self._windows.said.open()
        # The ranks' gradients meet in the backward pass of the last micro-batch.
        is_last = current.index + 1 == len(current.parts)
        if self._ranks.backend_sums and not self._is_apart and not is_last:
            block = self._block()
        training_step, backward = self._plain
        with undone, block, said:
            output = training_step(batch, *args, **kwargs)
            loss = self._taken(current, batch, output, is_filler=is_filler)
            if loss is not None and not current.is_forward_only:
                self._windows.batch_is_unfinished = True
                backward(loss, self._trainer.optimizers[0])

    def _taken(
        self, current: CutBatch, batch: Any, output: Any, *, is_filler: bool
    ) -> Tensor | None:
        """Take what `training_step` has returned for a micro-batch; returns its loss,
        whose backward pass will be weighed."""
        accumulator = self._accumulator
        if current.are_said and not is_filler:
            ((term, strategy),) = accumulator.strategies.items()
            assert isinstance(strategy, Weighed)
            said = self._windows.said
            current.weights[term][current.index] = (
                0 if output is None else said.take(strategy, self._module, batch)
            )
        if output is None:
            current.num_nothing += 1
            return None
        terms, extras = taken_apart(output, accumulator.strategies)
        values = {name: value_of(term) for name, term in terms.items()}
        if not is_filler:
            self._logs.know_terms(terms, accumulator.strategies)
            current.add(values, extras)
        (loss, value), *others = zip(terms.values(), values.values(), strict=True)
        if current.is_forward_only:
            return loss
        if others:
            loss = accumulator.join(terms)
            value = value_of(loss)
        if is_filler:
            loss = loss * 0  # the weight 0 has no effect on a sum
        weight = None if current.is_told else current.leading[current.index]
        accumulator.weigh(loss, weight, value=value, expected=current.num_expected)
        return loss

    @contextmanager
    def _apart(self, *, closes: bool) -> Iterator[None]:
        """A context in which no forward or backward pass of DDP waits for other ranks;
        `closes`: whether the window closes in it."""
        ddp = self._ranks.ddp
        if ddp is not None and not self._accumulator.is_open:
            send_forward_messages(ddp)
        with self._block():
            yield
        if ddp is not None and closes:
            owe_forward_messages(ddp)
