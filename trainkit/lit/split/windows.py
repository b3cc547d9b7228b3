"""The run of a loader batch as one window of several micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainkit.core.accumulator import Accumulator
from trainkit.core.gradients import parameters_of
from trainkit.core.split.cutting import MicroBatch
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.window import WindowStats
from trainkit.errors import TrainkitError
from trainkit.lit._compat import replaced, skips_backward
from trainkit.lit.callback.base import (
    OrderedCallback,
    WindowOwner,
    is_rehearsal,
    say_dropped,
    window_ends,
)
from trainkit.lit.callback.taken_calls import taken_calls
from trainkit.lit.proof.start import first_batches
from trainkit.lit.split import refusals
from trainkit.lit.split.auto import AutoSizes, Hosts
from trainkit.lit.split.logs import HeldLogs, WindowMetrics
from trainkit.lit.split.micro_batches import CutBatch, MicroBatches
from trainkit.lit.split.outputs import as_one
from trainkit.lit.split.passes import NOTHING, Passes
from trainkit.lit.split.pools import num_cuts

KEPT = ("num_loader_batches", "sizes", "trims", "waiting", "_options")

KEY = "trainkit_micro_batching"
"""The size that was found, in a checkpoint."""


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
        found: the size that an earlier run has found, as `state_dict` gives it.

    Attributes:
        sizes: find the limit for micro-batches, for `"auto"`.
        current: the loader batch that is being run, if one is.
        waiting: the loader batches of a pool that is not full.
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
        found: Mapping[str, Any] | None = None,
    ) -> None:
        self._trainer, self._module = trainer, pl_module
        self._options, self._windows = options, windows
        self._accumulator = accumulator = windows.accumulators[0]
        of = trainer, pl_module, options, accumulator.strategies
        refusals.refuse_before_training(*of)
        ranks, is_auto = accumulator.ranks, options.is_auto
        run_alike = refusals.communicates_in_forward(pl_module, ranks)
        self.sizes: AutoSizes | None = None
        if is_auto:
            refusals.refuse_auto(trainer, ranks, run_alike=run_alike)
            device = trainer.strategy.root_device
            self.sizes = AutoSizes(options.start, found, Hosts(ranks), device)
        self.current: CutBatch | None = None
        self.num_loader_batches = 0
        self.waiting: list[Any] = []
        may_trim = True if is_rehearsal(trainer) else None
        self.trims: bool | None = may_trim if options.trim else False
        self._logs = HeldLogs(pl_module)
        self._metrics = WindowMetrics(pl_module, ranks.size)
        of = trainer, pl_module, windows, self._logs
        self._passes = Passes(*of, may_repeat=is_auto)
        self._is_plain = self._passes.transfer.is_plain
        of = options, trainer, accumulator.strategies, self.sizes
        hosts = Hosts(ranks) if run_alike else None
        self._micro_batches = MicroBatches(*of, hosts, weighs=self._is_plain)
        self._batch_to_device = trainer.strategy.batch_to_device
        self._own: list[Tensor] = []
        self._stash: list[tuple[Tensor, Tensor | None]] = []
        self._is_complete = False
        self._patch = ExitStack()

    # ---- what the callback asks ------------------------------------------------------

    @property
    def size(self) -> int | None:
        """The size limit of a micro-batch, if it is to be found."""
        return None if self.sizes is None else self.sizes.shown

    @property
    def fills_up(self) -> bool:
        """Whether the present micro-batch only lets all ranks run equally many."""
        return self.current is not None and self.current.is_filler

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

    def start(self) -> None:
        """Replace the methods of Lightning's strategy object."""
        calls = taken_calls(
            self._trainer,
            self._windows,
            batch_to_device=self._leave_on_host,
            training_step=self._run,
            backward=self._end_backward,
        )
        self._patch.enter_context(calls)
        first = first_batches(self._trainer, self._module, self._windows)
        self._patch.enter_context(first)

    def stop(self) -> None:
        """Put Lightning's methods back; only the attributes in `KEPT` stay."""
        if hasattr(self, "_patch"):
            self._patch.close()
        kept = {name: it for name, it in vars(self).items() if name in KEPT}
        vars(self).clear()
        vars(self).update(kept, current=None)

    def _leave_on_host(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if self._trainer.training:
            return batch
        return self._batch_to_device(batch, *args, **kwargs)

    def keeps_gradients(self, optimizer: Any) -> bool:
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

    def weigh(self, loss: Tensor) -> None:
        """Weigh the pass that is about to run."""
        assert self.current is not None
        self._passes.weigh(self.current, loss)

    def finish(
        self, accumulator: Accumulator, owners: Any
    ) -> tuple[WindowStats, int | None]:
        """Divide the window of an optimizer or of parameters; returns its numbers, and
        how many loader batches it had on all ranks."""
        slots, is_apart = self._passes.slots(), self._passes.is_apart
        stats = accumulator.finish(owners, slots=slots, is_apart=is_apart)
        return stats, self.num_loader_batches * accumulator.ranks.size

    def _run(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a loader batch in place of `training_step`."""
        trainer, accumulator = self._trainer, self._accumulator
        self._windows.refuse_changes(self._module)
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
                self.waiting.append(batch)
                # Lightning takes None for a mistake on several ranks.
                return torch.zeros((), device=trainer.strategy.root_device)
            pool = [*self.waiting, batch]
            self.num_loader_batches = len(pool)
            batch = self._micro_batches.cutter.join(pool)
        attempt = partial(self._attempt, batch, args, kwargs, is_forward_only)
        apart = self._passes.apart(closes=closes) if self._passes.is_apart else NOTHING
        try:
            with replaced(self._module, log=self._logs.log), apart:
                if is_forward_only or self.sizes is None:
                    attempt()
                else:
                    of = self._module, accumulator, self._holders()
                    self.sizes.run(attempt, *of, self._forget)
            self._is_complete = closes
            found, self.waiting = self._end(), []
            return found
        finally:
            self.current = None
            self._metrics.close()

    def _holders(self) -> list[Tensor]:
        """The tensors that hold the gradients of the window."""
        wide = self._accumulator.gradients.wide
        return self._own if wide is None else [*self._own, *wide.stand_ins]

    def _drop_unstepped(self) -> None:
        """Drop a complete window whose step the module's `optimizer_step` has left out;
        Lightning zeroes its gradients now."""
        is_one = num_cuts(self._trainer, self._options) == 1
        is_complete = self._is_complete or is_one
        if is_complete and self._accumulator.window.is_open:
            held = self._accumulator.drop()
            if self._accumulator.ranks.index == 0:
                say_dropped(held, "its gradients were zeroed before its step")
        self._is_complete = False

    def _attempt(
        self, batch: Any, args: Any, kwargs: Any, is_forward_only: bool
    ) -> None:
        """Cut a loader batch, and run all its micro-batches."""
        has_shapes = self._options.shapes is not None
        trim = bool(self.trims) or has_shapes
        current = self._micro_batches.of(batch, trim=trim)
        self.current, current.is_forward_only = current, is_forward_only
        trainer = self._trainer
        if trainer.fit_loop.batch_idx < trainer.accumulate_grad_batches:
            self._metrics.find()
        self._metrics.open(current)
        self._logs.open(current)
        try:
            self._arrive(current)
            self._passes.run(current, args, kwargs)
        except StopIteration as error:
            raise refusals.stop_iteration("training_step") from error
        except Exception as error:
            refusals.add_note(error, batch, current)
            raise

    def _arrive(self, current: CutBatch) -> None:
        """Weigh what has hooks on its way to the device, and announce the window."""
        try:
            if not self._is_plain and not current.are_said:
                arrived = self._passes.transfer.arrive(current)
                current.weigh(self._accumulator.strategies, arrived)
        finally:  # in it ranks exchange, also one whose memory has run out
            if not current.is_forward_only:
                self._passes.announce(current)
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
