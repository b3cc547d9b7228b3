"""The callback that weights every backward pass and divides every window."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor

from trainkit.core.accumulator import Accumulator
from trainkit.core.checks import Checks
from trainkit.core.gradients import clear_gradients, parameters_of
from trainkit.core.ledger import FirstWindows, Ledger
from trainkit.core.ranks import Aggregation, check_aggregation
from trainkit.core.refusals import refuse_static_graph
from trainkit.core.strategies import AccumulationStrategy, Strategies, Uniform, Weight
from trainkit.core.terms import ONE, leading, named_strategies
from trainkit.core.window_stats import WindowStats
from trainkit.lit._compat import scaler_of, unscales_itself, unwrapped
from trainkit.lit.batch_norm.unguarded import unguarded
from trainkit.lit.batch_size.effective import loader_size, table_of_windows
from trainkit.lit.callback.base import Stopped, WindowOwner
from trainkit.lit.callback.left_behind import copied_without_fit, emptied
from trainkit.lit.callback.said_weight import SaidWeight
from trainkit.lit.callback.table import Row
from trainkit.lit.callback.window_end import say_dropped, window_ends
from trainkit.lit.proof.verdict import Proof, checked_proof
from trainkit.lit.resume import open_window
from trainkit.lit.resume.mid_epoch import begin_batch, resume
from trainkit.lit.windows import refusals
from trainkit.lit.windows.step_watch import StepWatch
from trainkit.lit.windows.streamed import streamed_steps


class WindowCallback(WindowOwner):
    """Base of the callback for foreign modules and of the mixin's callback.

    It stands in `trainer.callbacks` before all others that look at gradients, so that
    they see the exact gradient in `on_before_optimizer_step`.
    """

    order = 1

    def __init__(
        self,
        strategy: AccumulationStrategy | Strategies | None,
        *,
        aggregation: Aggregation = "auto",
        checks: Checks = "late",
        wide_gradients: bool = False,
        proof: Proof = "warn",
    ) -> None:
        super().__init__()
        self.ledger = Ledger()
        # Made here for its checks alone: the ranks are not known before training.
        self.strategies = {} if strategy is None else named_strategies(strategy)
        Accumulator(strategy or Uniform(), aggregation="none", checks=checks)
        check_aggregation(aggregation)
        self.aggregation: Aggregation = aggregation
        self.checks: Checks = checks
        self.wide_gradients = wide_gradients
        self.proof: Proof = checked_proof(proof)
        self._forget()

    def _forget(self) -> None:
        """Clear what belongs to one `fit`, so that nothing of it reaches the next."""
        self.accumulators: dict[int, Accumulator] = {}
        self.windows: dict[int, WindowStats] = {}
        self.first_windows = FirstWindows()
        self.weight: Weight | None = None
        self.said = SaidWeight()
        self._scaler: Any = None
        self._restored: Any = None
        self._meeting_point: Any = None
        self._step_watches: list[StepWatch] = []
        self._wants_weights: list[Callable[[int], bool]] = []
        self.counts_samples = False
        self._batch_is_unfinished = self._gradients_are_fresh = False
        self._num_closed = self._batch_idx = 0
        self._calls = ExitStack()
        self._divided: set[int] = set()
        self._undivided: set[int] = set()
        self.own_sizes, self.asked_sizes = frozenset[int](), set[int]()
        self.longest_window = 0
        self._warned_short_epoch = False
        self._skipped_before = 0
        self.is_measured = False

    def __getstate__(self) -> dict[str, Any]:
        return copied_without_fit(self)

    def _show_as(self, other: WindowCallback) -> None:
        """Show the numbers of a `fit` that another callback has run."""
        self.windows = {i: stats.on_host() for i, stats in other.windows.items()}
        self.first_windows = other.first_windows
        self.ledger = copy.copy(other.ledger)
        self._skipped_before = other.num_skipped_steps

    # ---- what others ask -------------------------------------------------------------

    @property
    def strategy(self) -> AccumulationStrategy:
        """The rule that weighs a micro-batch; with several terms, the first term's."""
        return leading(self.strategies)

    @property
    def last_window(self) -> WindowStats | None:
        """The window that closed last, where there is one optimizer."""
        return self.windows.get(0)

    @property
    def num_skipped_steps(self) -> int:
        """Optimizer steps that a gradient scaler has skipped since `fit` began."""
        skipped = sum(watch.num_skipped for watch in self._step_watches)
        return self._skipped_before + skipped

    def skipped_last_step(self, index: int = 0) -> bool:
        """Whether the last step of an optimizer was skipped by the gradient scaler."""
        return self._step_watches[index].skipped_last

    @property
    def micro_batch_size(self) -> int | None:
        """The size limit of a micro-batch, if training finds it itself; else None."""
        return None

    def keep_weights(self, wanted: Callable[[int], bool]) -> None:
        """Keep each micro-batch's weight in the windows (by index) that are `wanted`;
        `wanted` must answer alike on every rank."""
        self._wants_weights.append(wanted)

    # ---- before training -------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        refusals.refuse_two_drivers(trainer, self, WindowCallback)
        if stage != "fit":
            return
        self._forget()
        if trainer.global_step == 0:
            self.ledger = Ledger()  # else this `fit` continues the training
        refusals.refuse_backend_that_accumulates(trainer)
        refusals.announce_finders(trainer)
        self.move_to_front(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        resume(trainer, pl_module)
        scaler, num_expected = scaler_of(trainer), trainer.accumulate_grad_batches
        self._scaler = scaler
        refusals.refuse_closures_that_repeat(trainer, num_expected)
        refusals.refuse_unknown_backend(trainer)
        refusals.refuse_unseen_batches(pl_module, self.strategy, num_expected)
        refusals.refuse_no_optimizer(trainer)
        for index, optimizer in enumerate(map(unwrapped, trainer.optimizers)):
            accumulator = Accumulator(
                self.strategy if ONE in self.strategies else self.strategies,
                module=trainer.strategy,
                aggregation=self.aggregation,
                checks=self.checks,
                scaler=scaler,
            )
            refuse_static_graph(accumulator.ranks.ddp, num_expected)
            accumulator.gradients.parameters = parameters_of(optimizer)
            if self.wide_gradients:
                refusals.refuse_wide_under_scaler(scaler)
                accumulator.gradients.keep_wide(partial(parameters_of, optimizer))
            self.accumulators[index] = accumulator
            self._step_watches.append(StepWatch(optimizer, accumulator, scaler))
            if scaler is not None and unscales_itself(optimizer):
                refusals.announce_scaled_gradients(optimizer)
        if pl_module.automatic_optimization and self.accumulators:
            self.accumulators[0].num_windows = trainer.global_step
        if self.accumulators:
            ranks = self.accumulators[0].ranks
            self._meeting_point = refusals.make_meeting_point(ranks)
        self.first_windows.loader_size = loader_size(trainer)
        if (restored := self._restored) is not None:
            self.first_windows.load_state_dict(restored.get("measured", {}))
            open_window.restore(restored, self.accumulators, pl_module)
            open_window.announce_loader_that_starts_again(trainer, self.accumulators)
            self._restored = None
        self.take_calls(trainer, pl_module)
        self.show_table(trainer, pl_module)

    def table_rows(self, trainer: Any, pl_module: Any) -> list[Row]:
        rows = table_of_windows(trainer, self.strategies if self.has_strategy else {})
        rows += unguarded(trainer, pl_module, self)
        return rows

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if not self.accumulators:
            return
        ranks = self.accumulators[0].ranks
        refusals.refuse_unequal_loaders(trainer, ranks)
        if not self._warned_short_epoch:
            self._warned_short_epoch = refusals.announce_short_epoch(trainer)

    # ---- a micro-batch ---------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        begin_batch(trainer, pl_module)
        self._num_closed, self._batch_idx = 0, batch_idx
        if not self.accumulators:
            return
        if batch_idx == 0:  # GradientAccumulationScheduler has run by now
            num_expected = trainer.accumulate_grad_batches
            refusals.refuse_closures_that_repeat(trainer, num_expected)
        if trainer.is_last_batch:
            refusals.refuse_early_end(trainer, self._meeting_point)

    def take_calls(self, trainer: Any, pl_module: Any) -> None:
        """Weigh each batch as `training_step` gets it, until training is over."""
        self._calls.enter_context(streamed_steps(trainer, pl_module, self))

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self._batch_is_unfinished = True
        if not pl_module.automatic_optimization:
            return  # accumulate() weights the loss itself
        accumulator = self.accumulators[0]
        if not accumulator.is_open and not self._gradients_are_fresh:
            # Lightning zeroes gradients by the batch's index and steps by the number of
            # batches. If accumulate_grad_batches changes, or the loader yields None,
            # the two disagree and the old gradients are still there.
            clear_gradients(trainer.optimizers[0])
        num_expected = trainer.accumulate_grad_batches  # Lightning has divided by it
        value = loss.detach()
        if self._scaler is not None:
            value = value / self._scaler.scale(loss.new_ones(()))
        assert self.weight is not None
        accumulator.weigh(
            loss,
            self.weight,
            divided_by=num_expected,
            value=value,
            expected=num_expected,
        )
        if window_ends(trainer, self._batch_idx, num_expected):
            accumulator.announce(slots=self._slots(accumulator, num_expected))

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if pl_module.automatic_optimization:
            self.accumulators[0].passed()

    # ---- the end of a window ---------------------------------------------------------

    def on_before_optimizer_step(
        self, trainer: Any, pl_module: Any, optimizer: Any
    ) -> None:
        index = self.index_of(trainer, optimizer)
        accumulator = self.accumulators[index]
        if not pl_module.automatic_optimization:
            refusals.refuse_open_window(index, accumulator)
            if self.has_strategy and index not in self._divided | self._undivided:
                self._undivided.add(index)
                refusals.announce_undivided_step(index)
            self._divided.discard(index)
            return
        if not accumulator.is_open:
            # Nothing ran backward: gradients left from an earlier step (the BatchNorm
            # epoch of StochasticWeightAveraging) must not be stepped with again.
            clear_gradients(optimizer)
            return
        if not self._batch_is_unfinished and self._scaler is not None:
            refusals.refuse_none_on_last_micro_batch()
        refusals.refuse_second_closure(self._num_closed)
        self.close(trainer, index)

    def close(self, trainer: Any, index: int, *others: int) -> WindowStats:
        """Divide an optimizer's window; used by `finish_window` as well.

        Args:
            trainer: the Trainer.
            index: the optimizer that the window belongs to.
            others: further optimizers that train on these losses.
        """
        accumulator = self.accumulators[index]
        for each in (index, *others):
            self._step_watches[each].expect_step()
            self._divided.add(each)
        self._gradients_are_fresh = False
        self._num_closed = accumulator.num_micro_batches
        parameters = [
            p for i in (index, *others) for p in parameters_of(trainer.optimizers[i])
        ]
        stats = self._finish(trainer, accumulator, parameters)
        counts_samples = self.must_count_samples or self.is_split
        for each in (index, *others):
            self.windows[each] = stats
            self.ledger.add(each, stats, counts_samples=counts_samples)
        if index == 0:
            self.first_windows.add(stats, num_batches=self._num_loader_batches())
        return stats

    def _finish(
        self, trainer: Any, accumulator: Accumulator, parameters: list[Tensor]
    ) -> WindowStats:
        size = max(trainer.accumulate_grad_batches, self.longest_window)
        return accumulator.finish(parameters, slots=self._slots(accumulator, size))

    def _num_loader_batches(self) -> int | None:
        """How many loader batches the window had, on all ranks, if they were cut."""
        return None

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batch_is_unfinished = False
        if self.asked_sizes:
            self.own_sizes, self.asked_sizes = frozenset(self.asked_sizes), set()
        for watch in self._step_watches:
            watch.count_step()

    def _slots(self, accumulator: Accumulator, num_expected: int) -> int:
        wanted = any(wants(accumulator.num_windows) for wants in self._wants_weights)
        return num_expected if wanted else 0

    # ---- where a window ends early ---------------------------------------------------

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if pl_module.automatic_optimization and self.accumulators:
            self._drop("its gradients were zeroed before its step")
            self._gradients_are_fresh = True

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        refusals.refuse_early_end(trainer, self._meeting_point)
        if pl_module.automatic_optimization:
            self._drop("the epoch ended inside it")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._calls.close()
        self._drop("training ended inside it")
        for accumulator in self.accumulators.values():
            accumulator.watch.read_all()
        for watch in self._step_watches:
            watch.close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Release what the `fit` has held; only its numbers stay."""
        self._calls.close()  # a finder that leaves `fit` early calls this hook alone
        self._wants_weights.clear()
        self._scaler = self.weight = self._meeting_point = None
        self.accumulators = emptied(self.accumulators)

    def on_exception(
        self, trainer: Any, pl_module: Any, exception: BaseException
    ) -> None:
        self._calls.close()
        held = [a.num_micro_batches for a in self.accumulators.values() if a.is_open]
        if held and not isinstance(exception, Stopped):
            # This only warns: a checkpoint that is written because of the exception
            # may still save the window. The next fit forgets it.
            say_dropped(sum(held), f"{type(exception).__name__} ended training")
        for watch in self._step_watches:
            watch.close()

    def _drop(self, why: str) -> None:
        for accumulator in self.accumulators.values():
            if accumulator.is_open:
                self._gradients_are_fresh = False
                held = accumulator.drop()
                if accumulator.ranks.index == 0:
                    say_dropped(held, why)

    # ---- checkpoints -----------------------------------------------------------------

    def on_save_checkpoint(
        self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint[open_window.KEY] = open_window.save(
            self.accumulators,
            pl_module,
            num_torn=self._num_torn(),
            alone=trainer.interrupted,
        )
        checkpoint[open_window.KEY]["measured"] = self.first_windows.state_dict()
        checkpoint[open_window.KEY]["ledger"] = self.ledger.state_dict()

    def on_load_checkpoint(
        self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        self._restored = checkpoint.get(open_window.KEY)
        if self._restored is None:
            num_expected = trainer.accumulate_grad_batches
            self._restored = open_window.without_state(checkpoint, num_expected)
        if trainer.state.fn == "fit":  # else a test of another checkpoint
            self.ledger.load_state_dict(open_window.ledger_of(checkpoint))

    def _num_torn(self) -> int:
        """The size of a window whose last micro-batch is under way, else 0.

        A resumed run repeats that micro-batch, so its gradient must not be saved, and
        it cannot be taken out of the sum.
        """
        if not self._batch_is_unfinished:
            return 0
        held = sum(a.num_micro_batches for a in self.accumulators.values())
        return held or self._num_closed
