"""The driver of split windows: a loader batch is a window of several micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainkit.core.accumulator import Accumulator
from trainkit.core.gradients import parameters_of
from trainkit.core.said_weight import Weighed
from trainkit.core.split.cutting import MicroBatch
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.window import WindowStats
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
from trainkit.lit.split.micro_batches import CutBatch, MicroBatches
from trainkit.lit.split.outputs import (
    HeldLogs,
    WindowMetrics,
    put_together,
    taken_apart,
)
from trainkit.lit.split.pools import Pools

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
        cutter: cuts loader batches.
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
            self.sizes = AutoSizes(found, self._ranks, trainer.strategy)
        # In windows that may run again gradients stay on their ranks in all passes.
        self._is_apart = is_auto and self._ranks.backend_sums
        self.current: CutBatch | None = None
        self.num_loader_batches = 0
        self.trims = options.trim and is_rehearsal(trainer)
        self._logs = HeldLogs(pl_module)
        self._metrics = WindowMetrics(pl_module, self._ranks.size)
        self._transfer = Transfer(trainer, pl_module, strategies, may_repeat=is_auto)
        hosts = Hosts(self._ranks) if run_alike else None
        of = options, trainer, strategies, self.sizes, hosts
        self._micro_batches = MicroBatches(*of, weighs=self._transfer.is_plain)
        self.cutter = self._micro_batches.cutter
        self._plain: Any = trainer.strategy.training_step, trainer.strategy.backward
        self._batch_to_device = trainer.strategy.batch_to_device
        self._block = getattr(trainer.strategy, "block_backward_sync", nullcontext)
        self._meets = self._ranks.backend_sums and not self._is_apart
        self._own: list[Tensor] = []
        self._stash: list[tuple[Tensor, Tensor | None]] = []
        self._is_complete = False

    # ---- what the callback asks ------------------------------------------------------

    @property
    def size(self) -> int | None:
        """The size limit of a micro-batch, if it is to be found."""
        return None if self.sizes is None else self.sizes.shown

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
        size = trainer.accumulate_grad_batches
        # Lightning takes an epoch that only computes BatchNorm's statistics for one
        # window, so its size is not 1.
        is_forward_only = size > 1 and skips_backward(trainer)
        closes = size == 1 or window_ends(trainer, trainer.fit_loop.batch_idx, size)
        has_pool = self._options.pool is not None
        num_cuts = 1 if has_pool else size
        self._own = parameters_of(trainer.optimizers[0])
        if accumulator.window.is_open and (self._is_complete or num_cuts == 1):
            # The module's `optimizer_step` has left the step of a complete window out,
            # and Lightning zeroes its gradients now.
            held = accumulator.drop()
            if self._ranks.index == 0:
                say_dropped(held)
        self._is_complete = False
        if not accumulator.window.is_open:
            self.num_loader_batches = 0
            for parameter in self._own:
                parameter.grad = None
        self.num_loader_batches += not is_forward_only
        if has_pool and not is_forward_only:
            if not closes:
                self._pools.waiting.append(batch)
                # Lightning takes None for a mistake on several ranks.
                return torch.zeros((), device=trainer.strategy.root_device)
            pool = [*self._pools.waiting, batch]
            self.num_loader_batches = len(pool)
            batch = self.cutter.join(pool)
        sizes, apart = self.sizes, NOTHING
        if sizes is not None and self._is_apart:
            opens = not accumulator.window.is_open
            apart = sizes.apart(opens=opens, closes=closes)
        attempt = partial(self._attempt, batch, args, kwargs, num_cuts, is_forward_only)
        try:
            with self._holding_logs(), apart:
                if sizes is None or is_forward_only:
                    attempt()
                else:
                    wide = accumulator.gradients.wide
                    held = self._own if wide is None else [*self._own, *wide.stand_ins]
                    sizes.run(attempt, self._module, accumulator, held, self._forget)
            self._is_complete = closes
            found = self._end()
            self._pools.waiting = []
            return found
        finally:
            self.current = self._logs.current = None

    @contextmanager
    def _holding_logs(self) -> Iterator[None]:
        """A context in which logs are held, of the module and of callbacks, to each of
        which Lightning gives the module's `log`."""
        owners = [self._module, *self._trainer.callbacks]
        before = [vars(each).get("log") for each in owners]
        for each in owners:
            vars(each)["log"] = self._logs.log
        try:
            yield
        finally:
            for each, log in zip(owners, before, strict=True):
                if log is None:
                    vars(each).pop("log", None)
                else:
                    vars(each)["log"] = log

    def _attempt(
        self, batch: Any, args: Any, kwargs: Any, num_cuts: int, is_forward_only: bool
    ) -> None:
        """Cut a loader batch, and run all its micro-batches, with these further
        arguments of `training_step`."""
        trainer = self._trainer
        self.cutter.trim = self.trims or self._options.shapes is not None
        current = self._micro_batches.of(batch, num_cuts)
        current.is_forward_only = is_forward_only
        self.current = self._logs.current = current
        if trainer.fit_loop.batch_idx < trainer.accumulate_grad_batches:
            self._metrics.find()
        seeing = self._metrics.seeing(current) if self._metrics.found else NOTHING
        try:
            try:
                coming: Iterable[Any] = [part.batch for part in current.parts]
                if self._transfer.is_needed:
                    coming = self._transfer.bring(current)
            finally:  # in it ranks exchange, also one whose memory has run out
                if not is_forward_only:
                    self._announce(batch, current)
            with seeing:
                for current.index, current.batch in enumerate(coming):
                    self._pass(current, args, kwargs)
                    current.batch = None
        except StopIteration as error:  # by it Lightning would end the epoch
            raise RuntimeError("training_step raised StopIteration") from error
        except Exception as error:
            refusals.add_note(error, current)
            raise

    def _announce(self, batch: Any, current: CutBatch) -> None:
        """Tell the accumulator and other callbacks what comes, so that ranks begin to
        exchange it."""
        accumulator, trainer = self._accumulator, self._trainer
        if current.num_cuts == 1 and not current.are_said:
            accumulator.tell(current.weights)
        else:
            refusals.refuse_several_terms(accumulator.strategies, current.num_cuts)
            # Where the weight is said later, the first backward pass does this. But a
            # rank whose memory runs out would not come there.
            if self._is_apart or not current.are_said:
                rows = len(current.parts[0].rows)
                first = rows if current.are_said else current.leading[0]
                device = trainer.strategy.root_device
                accumulator.division.agree(first, current.num_expected, device)
        accumulator.window.count(**self._micro_batches.counts(batch, current))
        for callback in trainer.callbacks:
            if isinstance(callback, OrderedCallback) and callback.on_cut is not None:
                callback.on_cut(current.num_counting)

    def _forget(self) -> MicroBatch | None:
        """Drop what was collected in a pass in which memory ran out, on some rank;
        returns the micro-batch that was under way."""
        current, self.current = self.current, None
        return None if current is None else current.parts[current.index]

    def _end(self) -> Any:
        """Combine the logs and outputs of the micro-batches into one batch's; None if
        `training_step` returned None for all of them."""
        current = self.current
        assert current is not None
        found = None
        if current.losses:
            found = current.loss(self._accumulator.strategies)
            if current.extras:
                found = {"loss": found, **put_together(current)}
        if current.logged:
            self._logs.combine()
        if found is None and current.num_cuts == 1:
            self._accumulator.drop()  # else others of the window follow
        return found

    def finish(self, accumulator: Accumulator, owners: Any) -> WindowStats:
        """Divide the window of an optimizer or of parameters."""
        return accumulator.finish(owners, is_apart=self._is_apart)

    # ---- a micro-batch ---------------------------------------------------------------

    def _pass(self, current: CutBatch, args: Any, kwargs: Any) -> None:
        """Run a micro-batch forward and backward, with these further arguments of
        `training_step`."""
        undone = block = said = NOTHING
        if current.is_filler:
            undone = Kept(self._module, generators=False)
        if current.are_said:  # training_step may say what its loss weighs
            said = self._windows.said.open()
        # The ranks' gradients meet in the backward pass of the last micro-batch.
        if self._meets and current.index + 1 < len(current.parts):
            block = self._block()
        training_step, backward = self._plain
        with undone, block, said:
            output = training_step(current.batch, *args, **kwargs)
            loss = self._taken(current, output, is_filler=undone is not NOTHING)
            if loss is not None and not current.is_forward_only:
                self._windows.batch_is_unfinished = True
                backward(loss, self._trainer.optimizers[0])

    def _taken(
        self, current: CutBatch, output: Any, *, is_filler: bool
    ) -> Tensor | None:
        """Take what `training_step` has returned for a micro-batch; returns its loss,
        whose backward pass will be weighed."""
        accumulator, index = self._accumulator, current.index
        strategies = accumulator.strategies
        if current.are_said and not is_filler:
            ((term, strategy),) = strategies.items()
            assert isinstance(strategy, Weighed)
            said, of = self._windows.said, (strategy, self._module, current.batch)
            current.weights[term][index] = 0 if output is None else said.take(*of)
        if output is None:
            current.num_nothing += 1
            return None
        terms: Any = dict.fromkeys(strategies, output)
        extras = value = None
        if len(terms) > 1 or not isinstance(output, Tensor) or output.numel() != 1:
            terms, extras = taken_apart(output, strategies)
        loss, *others = terms.values()
        if not is_filler:
            if current.logged:
                self._logs.know_terms(terms, strategies)
            value = current.add(terms, extras)
        if current.is_forward_only:
            return loss
        if others:
            loss, value = accumulator.join(terms), None
        if is_filler:
            loss = loss * 0  # the weight 0 has no effect on a sum
        if accumulator.told is not None:
            accumulator.weigh(loss, value=value)
        else:
            of = {"value": value, "expected": current.num_expected}
            accumulator.weigh(loss, current.leading[index], **of)
        return loss
