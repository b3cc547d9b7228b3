"""The driver of split windows: loader batches are cut into the micro-batches of one
window."""

from __future__ import annotations

import math
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
from trainkit.lit._compat import hands_on_arguments, skips_backward
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
from trainkit.lit.split.micro_batches import CutWindow, MicroBatches
from trainkit.lit.split.outputs import (
    HeldLogs,
    WindowMetrics,
    put_together,
    taken_apart,
)
from trainkit.lit.split.pools import Given, Pools

KEPT = ("sizes", "trims", "_options")
"""The attributes that stay after training."""

KEY = "trainkit_micro_batching"
"""The size that was found, in a checkpoint."""

NOTHING = nullcontext()

CARRIED = (
    "the checkpoint has its gradients and not its loader batches, and this run cuts "
    "loader batches. Resume without micro_batching, or from a checkpoint behind a step"
)


class Split:
    """The driver of split windows: cuts its loader batches, and runs all micro-batches
    in one step.

    Three methods of Lightning's strategy object are replaced while `fit` runs. Loader
    batches stay whole, on the host, for Lightning and all callbacks. If a window has
    several, they wait until the last has come, so that its total is known. In place of
    that one's `training_step`, forward and backward passes of every micro-batch run
    through Lightning's own methods, so that all hooks, precisions and backends take
    part. The gradients are set aside while Lightning zeroes them, between forward and
    backward, and are put back in place of the backward pass.

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
        current: the window that is being run, if one is.
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
        refusals.refuse_before_training(pl_module, strategies)
        run_alike = refusals.communicates_in_forward(pl_module, self._ranks)
        self.sizes: AutoSizes | None = None
        if is_auto := options.is_auto:
            if run_alike:
                refusals.refuse_auto(trainer)
            self.sizes = AutoSizes(found, self._ranks, trainer.strategy)
        # In windows that may run again gradients stay on their ranks in all passes.
        self._is_apart = is_auto and self._ranks.backend_sums
        self.current: CutWindow | None = None
        self.trims = options.trim and is_rehearsal(trainer)
        self._logs = HeldLogs(pl_module)
        self._metrics = WindowMetrics(pl_module, self._ranks.size)
        self._transfer = Transfer(trainer, pl_module, strategies, may_repeat=is_auto)
        hosts = Hosts(self._ranks) if run_alike else None
        of = options, trainer, strategies, self.sizes, hosts
        self._micro_batches = MicroBatches(*of, weighs=self._transfer.is_plain)
        self.cutter = self._micro_batches.cutter
        self._plain: Any = trainer.strategy.training_step, trainer.strategy.backward
        self._hands_on = hands_on_arguments(trainer, pl_module)
        self._seed: dict[str, Tensor] = {}
        self._batch_to_device = trainer.strategy.batch_to_device
        self._block = getattr(trainer.strategy, "block_backward_sync", nullcontext)
        self._meets = self._ranks.backend_sums and not self._is_apart
        self._own: list[Tensor] = []
        self._stash: list[tuple[Tensor, Tensor | None]] = []
        self._is_forward_only = False

    # ---- what the callback asks ------------------------------------------------------

    @property
    def size(self) -> int | None:
        """The size limit of a micro-batch, if it is to be found."""
        return None if self.sizes is None else self.sizes.shown

    @property
    def rows_now(self) -> tuple[int, Sequence[int]] | None:
        """The number of the micro-batch under way, and its rows among the window's."""
        current = self.current
        if current is None:
            return None
        return current.index, current.parts[current.index].rows

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
        """Run a window in place of the `training_step` of its last loader batch; those
        before it wait on the host."""
        trainer, accumulator = self._trainer, self._accumulator
        size, waiting = trainer.accumulate_grad_batches, self._pools.waiting
        # Lightning takes an epoch that only computes BatchNorm's statistics for one
        # window, so its size is not 1.
        self._is_forward_only = size > 1 and skips_backward(trainer)
        is_last = size == 1 or window_ends(trainer, trainer.fit_loop.batch_idx, size)
        if accumulator.window.is_open:
            # The module's `optimizer_step` has left the step of a window out, and
            # Lightning zeroes its gradients now. Or a checkpoint has brought it.
            is_carried = accumulator.window.carried is not None
            why = (CARRIED,) if is_carried else ()
            held = accumulator.drop()
            if self._ranks.index == 0:
                say_dropped(held, *why)
        if not (is_last or self._is_forward_only):
            waiting.append((batch, args, kwargs))
            if math.isinf(trainer.num_training_batches):
                # So a rank whose batches have ended waits alone, and says so.
                self._ranks.sum_(torch.zeros((), device=trainer.strategy.root_device))
            # Lightning takes None for a mistake on several ranks.
            return torch.zeros((), device=trainer.strategy.root_device)
        self._own = parameters_of(trainer.optimizers[0])
        self._clear()
        given = [(batch, args, kwargs)]
        if not self._is_forward_only:
            given, self._pools.are_taken = [*waiting, *given], bool(waiting)
        attempt = partial(self._attempt, given)
        try:
            with self._holding_logs():
                if self.sizes is None or self._is_forward_only:
                    attempt()
                else:
                    with self.sizes.apart() if self._is_apart else NOTHING:
                        self.sizes.run(attempt, self._module, self._begin_again)
            return self._end()
        finally:
            self.current = self._logs.current = None

    @contextmanager
    def _holding_logs(self) -> Iterator[None]:
        """A context in which logs are held, of the module and of callbacks, to each of
        which Lightning gives the module's `log`."""
        owners = [vars(each) for each in (self._module, *self._trainer.callbacks)]
        before = [own.get("log") for own in owners]
        for own in owners:
            own["log"] = self._logs.log
        try:
            yield
        finally:
            for own, log in zip(owners, before, strict=True):
                if log is None:
                    own.pop("log", None)
                else:
                    own["log"] = log

    def _attempt(self, given: Sequence[Given]) -> None:
        """Cut the loader batches of a window, and run all their micro-batches."""
        trainer = self._trainer
        self.cutter.trim = self.trims or self._options.shapes is not None
        current = self.current = self._logs.current = self._micro_batches.of(
            [batch for batch, *_ in given]
        )
        if trainer.fit_loop.batch_idx < trainer.accumulate_grad_batches:
            self._metrics.find()
        seeing = self._metrics.seeing(current) if self._metrics.found else NOTHING
        try:
            try:
                coming: Iterable[Any] = [part.batch for part in current.parts]
                if self._transfer.is_needed:
                    coming = self._transfer.bring(current)
            finally:  # in it ranks exchange, also one whose memory has run out
                if not self._is_forward_only:
                    self._announce(current)
            with seeing:
                for current.index, current.batch in enumerate(coming):
                    part = current.parts[current.index]
                    # Counted from the last: a pool is one whole, which gets what its
                    # last loader batch came with, and others are as many as were given.
                    _, args, kwargs = given[part.source - len(current.wholes)]
                    self._pass(current, args, kwargs)
                    current.batch = None
        except Exception as error:
            refusals.add_note(error, current)
            raise

    def _announce(self, current: CutWindow) -> None:
        """Tell the accumulator and other callbacks what comes, so that ranks begin to
        exchange it."""
        accumulator, trainer = self._accumulator, self._trainer
        if not current.are_said:
            accumulator.tell(current.weights)
        elif self._is_apart:
            # The first backward pass does this too. But a rank whose memory runs out
            # would not come there.
            rows, number = len(current.parts[0].rows), len(current.parts)
            accumulator.division.agree(rows, number, trainer.strategy.root_device)
        accumulator.window.count(**self._micro_batches.counts(current))
        for callback in trainer.callbacks:
            if isinstance(callback, OrderedCallback) and callback.on_cut is not None:
                callback.on_cut(current.num_counting)

    def _begin_again(self) -> MicroBatch | None:
        """Forget what a pass has collected in which memory ran out, on some rank;
        returns the micro-batch that was under way, if the window was cut."""
        current, self.current = self.current, None
        if current is None:
            return None
        self._accumulator.drop()
        self._clear()
        return current.parts[current.index]

    def _clear(self) -> None:
        for parameter in self._own:
            parameter.grad = None

    def _end(self) -> Any:
        """Combine the logs and outputs of the micro-batches into one batch's; None if
        `training_step` returned None for all of them."""
        current = self.current
        assert current is not None
        if current.logged:
            self._logs.combine()
        if not current.losses:
            self._accumulator.drop()
            return None
        found = current.loss(self._accumulator.strategies)
        if current.extras:
            return {"loss": found, **put_together(current)}
        return found

    def finish(self, accumulator: Accumulator, owners: Any) -> WindowStats:
        """Divide the window of an optimizer or of parameters."""
        return accumulator.finish(owners, is_apart=self._is_apart)

    # ---- a micro-batch ---------------------------------------------------------------

    def _pass(self, current: CutWindow, args: Any, kwargs: Any) -> None:
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
            loss = self._taken(current, output)
            if loss is not None and not self._is_forward_only:
                self._windows.batch_is_unfinished = True
                backward(loss, self._trainer.optimizers[0], **self._seed)

    def _taken(self, current: CutWindow, output: Any) -> Tensor | None:
        """Take what `training_step` has returned for a micro-batch; returns its loss,
        whose backward pass will be weighed."""
        accumulator, index = self._accumulator, current.index
        strategies, is_filler = accumulator.strategies, current.is_filler
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
        if self._is_forward_only:
            return loss
        if others:
            loss, value = accumulator.join(terms), None
        if is_filler:
            loss = loss * 0  # the weight 0 has no effect on a sum
        self._weigh(current, loss, value)
        return loss

    def _weigh(self, current: CutWindow, loss: Tensor, value: Tensor | None) -> None:
        """Weigh the backward pass of a loss, which reports another value."""
        how: Any = {"value": value}
        if current.are_said:
            weight = current.leading[current.index]
            how |= {"weight": weight, "expected": len(current.parts)}
        self._seed = {}
        if self._hands_on and "backward" not in vars(self._module):
            self._seed = self._accumulator.seed(loss, **how)
        else:
            self._accumulator.weigh(loss, **how)
