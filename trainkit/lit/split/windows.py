"""Running a loader batch as one window of several micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from trainkit.core.accumulator import Accumulator
from trainkit.core.gradients import clear_gradients, parameters_of
from trainkit.core.out_of_memory import is_out_of_memory, release
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.strategies import Weight
from trainkit.lit._compat import replaced, skips_backward
from trainkit.lit.split import refusals
from trainkit.lit.split.held_logs import HELD, HeldLogs
from trainkit.lit.split.outputs import Returned, taken_apart
from trainkit.lit.split.parts import Part, Parts
from trainkit.lit.split.sizes import AutoSizes, Failure, FixedSizes
from trainkit.lit.split.snapshot import SetAside, Snapshot
from trainkit.lit.split.transfer import moved
from trainkit.lit.split.window_metrics import WindowMetrics
from trainkit.lit.window_end import window_ends


@dataclass
class Running:
    """A loader batch that is being run.

    Attributes:
        parts: its micro-batches.
        tells: whether the window is this loader batch alone, so that its total is known
            beforehand.
        closes: whether the window closes with it.
        logs: what has been logged in it.
        returned: what its micro-batches have returned.
        part: the micro-batch that runs.
        value: its loss, as reported.
        weight: what it weighs.
    """

    parts: list[Part]
    tells: bool
    closes: bool
    logs: HeldLogs = field(default_factory=HeldLogs)
    returned: Returned = field(default_factory=Returned)
    part: Part | None = None
    value: Tensor | None = None
    weight: Weight = 0

    @property
    def is_last(self) -> bool:
        return self.part is self.parts[-1]


class Windows(Protocol):
    """What the callback that divides windows lends."""

    accumulators: dict[int, Accumulator]

    def slots(self) -> int: ...

    def forget_means(self) -> None: ...


class SplitWindows:
    """Cuts each loader batch of a `fit` and runs its micro-batches in one step.

    Lightning's strategy object gets three methods of ours while `fit` runs. The loader
    batch stays whole, on the host, for Lightning and all callbacks. `training_step`
    runs forward and backward of every micro-batch, through Lightning's own methods, so
    that all hooks, precisions and backends take part. The gradients are set aside while
    Lightning zeroes them, between forward and backward, and are put back in place of
    the backward pass.

    Args:
        trainer: in `fit`.
        pl_module: a mixin module.
        options: its `micro_batching`.
        windows: the callback that divides them.
        sizes: say how the next window is cut.

    Attributes:
        running: the loader batch that is being run, if one is.
        is_apart: whether the gradients of the window are still on their ranks.
        num_loader_batches: how many of them the open window has on this rank.
    """

    def __init__(
        self,
        trainer: Any,
        pl_module: Any,
        options: MicroBatching,
        windows: Windows,
        sizes: FixedSizes | AutoSizes,
    ) -> None:
        accumulator = windows.accumulators[0]
        self.running: Running | None = None
        self.is_apart = False
        self.num_loader_batches = 0
        self.sizes = sizes
        self._windows = windows
        self._trainer = trainer
        self._module = pl_module
        self._accumulator = accumulator
        self._parts = Parts(options, pl_module, accumulator, sizes)
        self._metrics = WindowMetrics(pl_module, accumulator.ranks.size)
        self._strategy = trainer.strategy
        self._training_step = trainer.strategy.training_step
        self._backward = trainer.strategy.backward
        self._batch_to_device = trainer.strategy.batch_to_device
        self._aside: SetAside | None = None
        self._patch = ExitStack()

    # ---- Lightning's strategy object -------------------------------------------------

    def start(self) -> None:
        """Take Lightning's calls."""
        self._patch.enter_context(
            replaced(
                self._strategy,
                batch_to_device=self._leave_on_host,
                training_step=self._run,
                backward=self._end_backward,
            )
        )

    def stop(self) -> None:
        """Give them back."""
        self._patch.close()
        self.running = None

    def _leave_on_host(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if self._trainer.training:
            return batch
        return self._batch_to_device(batch, *args, **kwargs)

    def _end_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self._aside is not None:
            self._aside.put_back()
            self._aside = None
        return loss

    def set_aside(self, optimizer: Any) -> None:
        """Lightning is about to zero the gradients of the window that has just run."""
        self._aside = SetAside(parameters_of(optimizer))

    # ---- a loader batch --------------------------------------------------------------

    def _run(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """What Lightning runs as `training_step`."""
        is_forward_only = skips_backward(self._trainer)
        if not self._accumulator.is_open:
            self.num_loader_batches = 0
            clear_gradients(self._parameters())
        self.num_loader_batches += not is_forward_only
        try:
            if is_forward_only or not self.sizes.catches:
                self._pass(batch, args, kwargs)
            else:
                self._pass_until_it_fits(batch, args, kwargs)
            return self._end()
        finally:
            vars(self._module).pop(HELD, None)
            self.running = None
            self._metrics.forget()

    def _end(self) -> Any:
        """What the micro-batches logged and returned becomes that of one batch."""
        running = self.running
        assert running is not None
        vars(self._module).pop(HELD, None)
        self._metrics.close()
        counting = [part.micro_batch for part in running.parts if part.counts]
        running.logs.log(self._module, num_rows=sum(len(m.rows) for m in counting))
        if running.returned.is_nothing:
            self._accumulator.drop()
            return None
        return running.returned.as_one(self._accumulator.strategies, running.parts)

    def _pass(self, batch: Any, args: Any, kwargs: Any) -> None:
        """Forward and backward of every micro-batch."""
        parts = self._parts.of(batch)
        size = self._trainer.accumulate_grad_batches
        tells = size == 1
        closes = window_ends(self._trainer, self._trainer.fit_loop.batch_idx, size)
        running = self.running = Running(parts, tells, closes)
        if skips_backward(self._trainer):
            running.tells = running.closes = False
        else:
            self._begin(running, size)
        if len(parts) > 1:
            self._metrics.open()
        vars(self._module)[HELD] = running.logs
        batches = [part.micro_batch.batch for part in parts]
        move = self._batch_to_device
        for part, on_device in zip(
            parts, moved(batches, move, self._strategy.root_device), strict=True
        ):
            running.part = part
            running.logs.begin(on_device, part.weights, is_muted=not part.counts)
            before = None if part.counts else Snapshot(self._module, random=False)
            with self._apart_unless_last(running):
                output = self._training_step(on_device, *args, **kwargs)
                self._take(running, output)
            if before is not None:
                before.restore()
        running.returned.refuse_some_nothing()

    def _begin(self, running: Running, size: int) -> None:
        accumulator, parts = self._accumulator, running.parts
        if running.tells:
            accumulator.expect(
                weights={t: [p.weights[t] for p in parts] for t in parts[0].weights}
            )
        else:
            first = next(iter(parts[0].weights.values()))
            accumulator.settle(first, size * len(parts), self._strategy.root_device)
        counting = [part.micro_batch for part in parts if part.counts]
        accumulator.count(
            padding=sum(m.padded - m.real for m in counting),
            tokens=sum(m.padded for m in counting),
            samples=sum(len(m.rows) for m in counting),
        )

    def _apart_unless_last(self, running: Running) -> AbstractContextManager[Any]:
        """The ranks' gradients meet in the backward pass of the last micro-batch, if
        nothing in the window can fail on one rank alone."""
        if running.is_last:
            self.is_apart = not self.sizes.is_proven() and self._several_ranks
            if not self.is_apart:
                return nullcontext()
        return getattr(self._strategy, "block_backward_sync", nullcontext)()

    @property
    def _several_ranks(self) -> bool:
        return self._accumulator.ranks.backend_sums

    def _take(self, running: Running, output: Any) -> None:
        """The backward pass of the micro-batch whose forward pass has run."""
        assert running.part is not None
        if output is None:
            running.returned.add_nothing()
            return
        loss, extras = taken_apart(output)
        refusals.refuse_output(loss)
        if running.part.counts:
            running.returned.add(output, loss, extras)
        if isinstance(loss, Mapping):
            running.logs.know_terms(loss)
        if skips_backward(self._trainer):
            return
        weights = running.part.weights
        if running.tells:
            loss, running.weight = self._accumulator.take(loss)
        else:
            running.weight = next(iter(weights.values()))
        assert isinstance(loss, Tensor)
        running.value = loss.detach().clone()
        self._backward(loss, self._trainer.optimizers[0])

    def weigh(self, loss: Tensor) -> None:
        """In `on_before_backward`, with the loss as a gradient scaler has left it."""
        running, accumulator = self.running, self._accumulator
        assert running is not None
        expected = self._trainer.accumulate_grad_batches * len(running.parts)
        accumulator.weigh(loss, running.weight, value=running.value, expected=expected)
        if running.closes and running.is_last and not self.is_apart:
            accumulator.announce(slots=self._windows.slots())

    # ---- where memory runs out -------------------------------------------------------

    def _pass_until_it_fits(self, batch: Any, args: Any, kwargs: Any) -> None:
        before = None
        if self._accumulator.is_open:
            before = SetAside(self._parameters())
            self._accumulator.put_away()
        snapshot, mark = Snapshot(self._module), self._accumulator.mark()
        while True:
            failure = self._attempt(batch, args, kwargs)
            if not self.sizes.failed_anywhere(failure):
                break
            self._accumulator.rewind(mark)
            clear_gradients(self._parameters())
            self._metrics.forget()
            self._windows.forget_means()
            snapshot.restore()
        if before is not None:
            before.add_back()
            self._accumulator.passed()

    def _attempt(self, batch: Any, args: Any, kwargs: Any) -> Failure | None:
        """One pass over the loader batch; where memory ran out, if it did."""
        try:
            self._pass(batch, args, kwargs)
        except Exception as error:
            if not is_out_of_memory(error) or self._cannot_be_repeated():
                raise
            assert self.running is not None
            part = self.running.part or self.running.parts[0]
            micro_batch = part.micro_batch
            failure = Failure(
                micro_batch.padded, len(micro_batch.rows), type(error).__name__
            )
            release(error)
            self.running = None
            return failure
        return None

    def _cannot_be_repeated(self) -> bool:
        """The other ranks may be waiting inside this window's backward passes."""
        return self._several_ranks and self.sizes.is_proven()

    # ---- small things ----------------------------------------------------------------

    def _parameters(self) -> list[Tensor]:
        """What holds the gradients of the window."""
        own = parameters_of(self._trainer.optimizers[0])
        wide = self._accumulator.wide
        return own if wide is None else [*own, *wide.stand_ins]
