"""The run of a loader batch as one window of several micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor

from trainkit.core.accumulator import Accumulator
from trainkit.core.gradients import parameters_of
from trainkit.core.joins.steps import JoinedSteps
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.window import WindowStats
from trainkit.errors import TrainkitError
from trainkit.lit._compat import (
    current_hook,
    replaced,
    skips_backward,
    uncompiled,
)
from trainkit.lit.callback.base import (
    OrderedCallback,
    WindowOwner,
    is_rehearsal,
    say_dropped,
    window_ends,
)
from trainkit.lit.callback.table import say
from trainkit.lit.callback.taken_calls import taken_calls
from trainkit.lit.proof.first_batch import first_batches
from trainkit.lit.split import refusals
from trainkit.lit.split.current_window import CurrentWindow
from trainkit.lit.split.cut_note import add_note
from trainkit.lit.split.gradients import StashedGradients
from trainkit.lit.split.held_logs import HeldLogs, by_name, is_loggable
from trainkit.lit.split.micro_batches import MicroBatches, counts_of
from trainkit.lit.split.passes import Passes
from trainkit.lit.split.retry import Retry
from trainkit.lit.split.shortcuts import TRANSFER
from trainkit.lit.split.sizes import sizes_for
from trainkit.lit.split.window_metrics import WindowMetrics

KEPT = ("is_apart", "num_loader_batches", "sizes", "trims", "_patch")

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
        sizes: the limit for the next window's micro-batches.
        current: the loader batch that is being run, if one is.
        is_apart: whether the gradients of the window are still on their ranks.
        num_loader_batches: how many loader batches the open window has on this rank.
        trims: whether columns that are only padding are left out; None until the first
            batch that has some.
    """

    def __init__(
        self,
        trainer: Any,
        pl_module: Any,
        options: MicroBatching,
        windows: WindowOwner,
        found: Mapping[str, Any] | None = None,
    ) -> None:
        accumulator = windows.accumulators[0]
        self.current: CurrentWindow | None = None
        self.is_apart = False
        self.num_loader_batches = 0
        sizes = self.sizes = sizes_for(pl_module, options, accumulator.ranks, found)
        may_trim = True if is_rehearsal(trainer) else None
        self.trims: bool | None = may_trim if options.trim else False
        self._windows = windows
        self._trainer = trainer
        self._module = pl_module
        self._accumulator = accumulator
        self._options = options
        self._metrics = WindowMetrics(pl_module, accumulator.ranks.size)
        self._passes = Passes(trainer, pl_module, windows, sizes, self._metrics)
        self.cut_anew()
        self._retry = Retry(
            pl_module,
            accumulator,
            sizes,
            parameters=self._parameters,
            current=lambda: self.current,
            forget=self._forget,
        )
        self._batch_to_device = trainer.strategy.batch_to_device
        self._log = uncompiled(pl_module, self._hold)
        self._stash: StashedGradients | None = None
        self._is_complete = self._has_said_shared = False
        self._patch = ExitStack()

    def cut_anew(self) -> None:
        """Cut by the accumulator's strategies, which may have changed."""
        refusals.refuse_before_training(
            self._trainer, self._module, self._options, self._accumulator.strategies
        )
        self._micro_batches = MicroBatches(
            self._options,
            self._module,
            self._accumulator,
            self.sizes,
            is_joined=self.joined is not None,
        )

    # ---- what the callback asks ------------------------------------------------------

    is_split = True

    @property
    def size(self) -> int | None:
        """The size limit of a micro-batch, if it is to be found."""
        return self.sizes.shown

    @property
    def fills_up(self) -> bool:
        """Whether the present micro-batch only lets all ranks run equally many."""
        micro_batch = None if self.current is None else self.current.micro_batch
        return micro_batch is not None and micro_batch.is_filler

    def rows_now(self) -> tuple[int, Sequence[int]] | None:
        """The number of the micro-batch under way, and its rows."""
        current = self.current
        if current is None or current.at is None:
            return None
        numbers = [n for n, m in enumerate(current.micro_batches) if m is current.at]
        return numbers[0], current.at.cut.rows

    def num_torn(self, num_closed: int) -> int:
        """How many loader batches are in the window of the one under way."""
        return self.num_loader_batches

    def state_dict(self) -> dict[str, Any] | None:
        """The size that was found, for a checkpoint."""
        return self.sizes.search.state_dict() if self.sizes.catches else None  # type: ignore[union-attr]

    def follow(self) -> None:
        """Weigh by other strategies."""
        self.cut_anew()

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

    def end_epoch(self) -> None:
        """Compare the weights not read yet."""
        if hasattr(self, "_passes") and self._passes.arrivals is not None:
            self._passes.arrivals.read_all()

    @property
    def joined(self) -> JoinedSteps | None:
        """What lets BatchNorm see the whole window, if somebody asks for it."""
        return self._passes.joined

    def join(self, joined: JoinedSteps) -> None:
        """Let the steps of a window's micro-batches wait for each other at BatchNorm's
        layers, until `stop`."""
        several = self.sizes.catches and self._accumulator.ranks.size > 1
        refusals.refuse_auto_between_ranks(self._trainer, several)
        self._passes.joined = joined
        self.cut_anew()
        joined.install()
        self._patch.callback(joined.remove)

    def stop(self) -> None:
        """Put Lightning's methods back; only the attributes in `KEPT` stay."""
        self._patch.close()
        self.current = None
        numbers = {name: it for name, it in vars(self).items() if name in KEPT}
        vars(self).clear()
        vars(self).update(numbers)

    def _leave_on_host(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if self._trainer.training:
            return batch
        return self._batch_to_device(batch, *args, **kwargs)

    def _end_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self._stash is not None:
            self._stash.put_back()
            self._stash = None
        return loss

    def keeps_gradients(self, optimizer: Any) -> bool:
        """Whether the window is open: its gradients are then put away, before Lightning
        zeroes them."""
        is_open = self._accumulator.is_open
        if is_open:
            self._stash = StashedGradients(parameters_of(optimizer))
        return is_open

    def finish(
        self, accumulator: Accumulator, parameters: list[Tensor]
    ) -> tuple[WindowStats, int | None]:
        """Divide the window; returns its numbers, and how many loader batches it had on
        all ranks."""
        stats = accumulator.finish(
            parameters, slots=self.slots(), is_apart=self.is_apart
        )
        return stats, self.num_loader_batches * accumulator.ranks.size

    def slots(self) -> int:
        """How many single weights of each rank a closing window has room for."""
        accumulator = self._accumulator
        told = accumulator.told
        if told is not None:
            return self._windows.slots_of(told.most_micro_batches())
        # Ranks do not know each other's numbers, and must ask for as many.
        is_alone = accumulator.ranks.size == 1
        return self._windows.slots_of(accumulator.num_micro_batches) * is_alone

    # ---- a loader batch --------------------------------------------------------------

    def has_padding(self, batch: Any) -> bool | None:
        """Whether some rows of a loader batch have columns that only pad; None if
        nothing tells their lengths."""
        try:
            return self._micro_batches.has_padding(batch)
        except TrainkitError:  # a hook may add what is missing before it is cut
            return False

    def _run(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a loader batch in place of `training_step`."""
        is_forward_only = skips_backward(self._trainer)
        self._windows.follow(self._module)
        self._drop_unstepped()
        if not self._accumulator.is_open:
            self.num_loader_batches = 0
            for parameter in self._parameters():
                parameter.grad = None
        self.num_loader_batches += not is_forward_only
        try:
            with replaced(self._module, log=self._log):
                if is_forward_only or not self.sizes.catches:
                    self._pass(batch, args, kwargs)
                else:
                    self._retry.run(partial(self._pass, batch, args, kwargs))
            return self._end()
        finally:
            self.current = None
            self._metrics.close()

    def _drop_unstepped(self) -> None:
        """Drop a complete window whose step the module's `optimizer_step` has left out;
        Lightning zeroes its gradients now."""
        is_complete = self._is_complete or self._trainer.accumulate_grad_batches == 1
        if is_complete and self._accumulator.is_open:
            held = self._accumulator.drop()
            if self._accumulator.ranks.index == 0:
                say_dropped(held, "its gradients were zeroed before its step")
        self._is_complete = False

    def _end(self) -> Any:
        """Combine the logs and outputs of the micro-batches into one batch's."""
        assert (current := self.current) is not None
        self._is_complete = current.closes
        self._metrics.close()
        counting = [each.cut for each in current.micro_batches if not each.is_filler]
        current.logs.log(self._module, num_rows=sum(len(m.rows) for m in counting))
        if current.returned.is_nothing:
            if current.is_whole_window:  # else others of the window follow
                self._accumulator.drop()
            return None
        strategies = self._accumulator.strategies
        return current.returned.as_one(strategies, current.micro_batches)

    def _pass(self, batch: Any, args: Any, kwargs: Any) -> None:
        """Run forward and backward passes of every micro-batch."""
        if self._passes.arrivals is not None:
            self._passes.arrivals.begin()
        micro_batches = self._micro_batches.of(batch, trim=bool(self.trims))
        size = self._trainer.accumulate_grad_batches
        closes = window_ends(self._trainer, self._trainer.fit_loop.batch_idx, size)
        logs = HeldLogs(self._metrics)
        current = self.current = CurrentWindow(micro_batches, size == 1, closes, logs)
        current.is_forward_only = skips_backward(self._trainer)
        if not current.is_forward_only:
            self._begin(current, size)
        if self._trainer.fit_loop.batch_idx == 0:
            self._metrics.find()
            self._say_shared()
        self._metrics.open(len(micro_batches))
        try:
            self._passes.run(current, size, args, kwargs)
            self.is_apart = self._passes.is_apart
        except StopIteration as error:
            raise refusals.stop_iteration("training_step") from error
        except Exception as error:
            add_note(error, batch, current)
            raise
        current.returned.refuse_some_nothing()
        if self._passes.arrivals is not None:
            self._passes.arrivals.end()

    def _say_shared(self) -> None:
        """Say once what every micro-batch gets whole, since it is not as long as the
        batch has rows."""
        shared, said = self._micro_batches.shared_fields(), self._has_said_shared
        if shared and not said and self._trainer.is_global_zero:
            names = ", ".join(map(repr, shared))
            say(self._trainer, ("split", f"every micro-batch gets all of {names}"))
        self._has_said_shared = True

    def _hold(
        self, name: str, value: Any, *args: Any, weight: Any = None, **kwargs: Any
    ) -> None:
        """The module's `log` while a window runs."""
        assert self.current is not None
        is_moving = current_hook(self._module) in TRANSFER
        if is_moving or not is_loggable(value):  # Lightning refuses it by name
            type(self._module).log(self._module, name, value, *args, **kwargs)
        logs, options = self.current.logs, by_name(args) | kwargs
        logs.hold(self._module, name, value, weight, options)

    def _begin(self, current: CurrentWindow, size: int) -> None:
        accumulator, cut = self._accumulator, current.micro_batches
        if current.are_said:
            if accumulator.ranks.backend_sums and self.sizes.catches:
                # A rank whose memory runs out would never say its first weight.
                first = len(cut[0].cut.rows)
                device = self._trainer.strategy.root_device
                accumulator.division.agree(first, size * len(cut), device)
        elif current.is_whole_window:
            accumulator.expect(
                weights={t: [each.weights[t] for each in cut] for t in cut[0].weights}
            )
        else:
            refusals.refuse_terms_of_several_batches(
                self._trainer, accumulator.strategies
            )
            first = next(iter(cut[0].weights.values()))
            device = self._trainer.strategy.root_device
            accumulator.division.agree(first, size * len(cut), device)
        accumulator.window.count(**counts_of(cut))
        for callback in self._trainer.callbacks:
            if isinstance(callback, OrderedCallback):
                callback.on_cut(sum(not each.is_filler for each in cut))

    def before_backward(self, loss: Tensor, batch_idx: int, *, is_fresh: bool) -> None:
        """Weigh the pass that is about to run."""
        self.weigh(loss)

    def weigh(self, loss: Tensor, *, as_seed: bool = False) -> Tensor | None:
        """Weigh the loss, after a gradient scaler, before its backward pass; with
        `as_seed`, returns a seed for the pass if it can replace a hook."""
        current, accumulator = self.current, self._accumulator
        assert current is not None
        assert current.value is not None
        weigh = accumulator.seed if as_seed else accumulator.weigh
        expected = self._trainer.accumulate_grad_batches * len(current.micro_batches)
        seed = weigh(loss, current.weight, value=current.value, expected=expected)
        return seed if isinstance(seed, Tensor) else None

    def _forget(self) -> None:
        """Drop what was collected in a pass in which memory ran out, on some rank."""
        self.current = None
        self._metrics.close()
        self._windows.forget_means()

    def _parameters(self) -> list[Tensor]:
        """The tensors that hold the gradients of the window."""
        own = parameters_of(self._trainer.optimizers[0])
        wide = self._accumulator.gradients.wide
        return own if wide is None else [*own, *wide.stand_ins]
