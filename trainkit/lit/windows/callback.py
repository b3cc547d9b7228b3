"""The callback that weighs every backward pass and divides every window."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from trainkit.core.accumulator import Accumulator
from trainkit.core.checks import Checks
from trainkit.core.documents import documents_option
from trainkit.core.gradients import clear_gradients, parameters_of
from trainkit.core.ledger import NUM_WAITING, Ledger
from trainkit.core.ranks import Aggregation, check_aggregation
from trainkit.core.refusals import refuse_static_graph
from trainkit.core.strategies import AccumulationStrategy, Strategies, Uniform
from trainkit.core.terms import ONE, named_strategies
from trainkit.core.wide_gradients import WideGradients
from trainkit.core.window import WindowStats
from trainkit.lit._compat import scaler_of, unscales_itself, unwrapped
from trainkit.lit.batch_norm.announce import say_unguarded
from trainkit.lit.batch_norm.exact import cut_inside
from trainkit.lit.batch_size import table_of_windows
from trainkit.lit.callback.base import ZEROED, Stopped, WindowOwner, say_dropped
from trainkit.lit.callback.table import Row
from trainkit.lit.inside.cuts import InsideCuts
from trainkit.lit.inside.refusals import refuse_several_unweighed
from trainkit.lit.proof.report import Proof, checked_proof
from trainkit.lit.proof.start import first_batches
from trainkit.lit.resume import open_window
from trainkit.lit.resume._compat import tell_streams
from trainkit.lit.resume.mid_epoch import begin_batch, resume
from trainkit.lit.split import refusals as of_split
from trainkit.lit.split.micro_batches import described
from trainkit.lit.split.pools import Pools
from trainkit.lit.split.windows import KEY, Split
from trainkit.lit.windows import refusals
from trainkit.lit.windows.skipped_steps import SkippedSteps
from trainkit.lit.windows.streamed import Streamed


class WindowCallback(WindowOwner):
    """Base of the callback for foreign modules and of the mixin's callback.

    It stands in `trainer.callbacks` before all others that look at gradients, so that
    they see the exact gradient in `on_before_optimizer_step`. What differs between the
    kinds of window is in its driver.
    """

    def __init__(
        self,
        strategy: AccumulationStrategy | Strategies | None,
        *,
        aggregation: Aggregation = "auto",
        checks: Checks = "late",
        wide_gradients: bool = False,
        proof: Proof = "warn",
    ) -> None:
        super().__init__({} if strategy is None else named_strategies(strategy))
        # Made here for its checks alone: the ranks are not known before training.
        Accumulator(strategy or Uniform(), aggregation="none", checks=checks)
        check_aggregation(aggregation)
        self.aggregation: Aggregation = aggregation
        self.checks: Checks = checks
        self.wide_gradients = wide_gradients
        self.proof: Proof = checked_proof(proof)

    def _forget(self) -> None:
        super()._forget()
        self._restored = self._found = self._meeting_point = None
        self._num_closed = 0
        self._divided: set[int] = set()
        self._undivided: set[int] = set()
        self._has_begun = False
        self._pools = Pools()

    # ---- what others ask -------------------------------------------------------------

    @property
    def split(self) -> Split | None:
        """The driver, if it cuts loader batches on the host."""
        return self.driver if isinstance(self.driver, Split) else None

    # ---- before training -------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        refusals.refuse_two_drivers(trainer, self, WindowCallback)
        if stage != "fit":
            return
        self._forget()
        if trainer.global_step == 0:
            self.ledger = Ledger()  # else this `fit` continues the training
        refusals.refuse_unknown_backend(trainer)
        self._may_search = refusals.announce_finders(trainer)
        self.move_to_front(trainer)
        self._pools.begin(trainer, self.micro_batching)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        of_split.refuse_wrong_type(self.micro_batching)
        moved = cut_inside(trainer, pl_module, trainer.callbacks, self.micro_batching)
        self.moved_inside = moved if moved is not self.micro_batching else None
        options = self.cut
        if options is not None and not self.is_split:
            how = documents_option(options, *self.strategies.values())
            self.inside = InsideCuts(pl_module, replace(options, documents=how))
            self.inside.load_state_dict(self._found or {})
            self.inside.start()
        if not self.has_strategy:
            refuse_several_unweighed(trainer, pl_module, self)
        split = options if self.is_split else None
        self._pools.start(self.micro_batching, is_split=split is not None)
        of_split.refuse_fillers_that_count(trainer, pl_module, self.strategies)
        resume(trainer, pl_module)
        self.scaler, num_expected = scaler_of(trainer), trainer.accumulate_grad_batches
        if pl_module.automatic_optimization:
            refusals.refuse_other_windows(trainer, num_expected)
        refusals.refuse_no_optimizer(trainer)
        for index, optimizer in enumerate(map(unwrapped, trainer.optimizers)):
            self._accumulate(index, optimizer, trainer)
        if pl_module.automatic_optimization:
            self.accumulators[0].num_windows = trainer.global_step
        ranks = self.accumulators[0].ranks
        self._meeting_point = refusals.make_meeting_point(ranks)
        if self._restored is not None:
            open_window.restore(self._restored, self, trainer, pl_module)
            self._restored = None
        if split is None:
            refusals.refuse_several_terms(self.strategies)
            self.driver = Streamed(trainer, pl_module, self)
        else:
            of = trainer, pl_module, split, self, self._pools
            self.driver = Split(*of, self._found)
        self._take(trainer, trainer.strategy, **self.driver.calls())
        self._taken.enter_context(first_batches(trainer, pl_module, self))
        if self.scaler is not None and self.hold_schedulers:
            loop = trainer.fit_loop.epoch_loop
            move = partial(self._move_schedulers, loop.update_lr_schedulers)
            self._take(trainer, loop, update_lr_schedulers=move)
        self.show_table(trainer, pl_module)

    def _move_schedulers(self, plain: Any, interval: str, **how: Any) -> None:
        """Let Lightning move the schedulers, unless a scaler has skipped the step."""
        is_step = interval == "step" and self._num_closed > 0
        if not (is_step and self.skipped_last_step()):
            plain(interval, **how)

    def _accumulate(self, index: int, optimizer: Any, trainer: Any) -> None:
        """Make the accumulator of an optimizer."""
        self.accumulators[index] = accumulator = Accumulator(
            self.strategy if ONE in self.strategies else self.strategies,
            module=trainer.strategy,
            aggregation=self.aggregation,
            checks=self.checks,
            scaler=self.scaler,
        )
        num_expected = 2 if self.is_split else trainer.accumulate_grad_batches
        refuse_static_graph(accumulator.ranks.ddp, num_expected)
        gradients, training = accumulator.gradients, parameters_of(optimizer)
        gradients.parameters = training
        is_by_hand = not trainer.lightning_module.automatic_optimization
        if is_by_hand and accumulator.ranks.backend_sums:
            accumulator.division.begin_apart()
        if self.wide_gradients:
            refusals.refuse_wide_under_scaler(self.scaler)
            gradients.wide = WideGradients(training, ranks=accumulator.ranks)
        self._skipped.append(SkippedSteps(optimizer, self.scaler))
        before = partial(self._before_step, accumulator)
        after = partial(self._after_step, index)
        with suppress(AttributeError):  # one of another kind may have no such hooks
            self._step_hooks.append(optimizer.register_step_pre_hook(before))
            self._step_hooks.append(optimizer.register_step_post_hook(after))
        if self.scaler is not None and unscales_itself(optimizer):
            refusals.announce_scaled_gradients(optimizer)

    def table_rows(self, trainer: Any, pl_module: Any) -> list[Row]:
        rows = table_of_windows(trainer, self.strategies if self.has_strategy else {})
        if self.is_split:
            is_step = trainer.accumulate_grad_batches == 1
            how = documents_option(self.cut, *self.strategies.values())
            cut = replace(self.cut, documents=how)
            rows.append(("split", described(cut, is_step=is_step)))
        if self.inside is not None:
            how = {"has_strategy": self.has_strategy, "num_ranks": trainer.world_size}
            rows.append(self.inside.table_row(**how))
        return rows

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if self.driver is None:
            raise refusals.not_in_fit(pl_module)
        tell_streams(trainer)  # an epoch may have new loaders
        refusals.refuse_unequal_loaders(trainer, self.accumulators[0].ranks)

    # ---- a micro-batch ---------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.fit_loop.restarting:
            begin_batch(trainer, pl_module)
        if not self._has_begun:
            self._has_begun = True
            say_unguarded(trainer, pl_module, self)
        self._num_closed = 0
        if trainer.is_last_batch:
            refusals.refuse_early_end(trainer, self._meeting_point)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if pl_module.automatic_optimization:  # else accumulate() does it
            self.accumulators[0].gradients.add()

    # ---- the end of a window ---------------------------------------------------------

    def on_before_optimizer_step(
        self, trainer: Any, pl_module: Any, optimizer: Any
    ) -> None:
        is_automatic = pl_module.automatic_optimization
        index = 0 if is_automatic else self.index_of(trainer, optimizer)
        accumulator = self.accumulators[index]
        if not is_automatic:
            refusals.refuse_open_window(index, accumulator)
            if self.has_strategy and index not in self._divided | self._undivided:
                self._undivided.add(index)
                refusals.announce_undivided_step(index)
            self._divided.discard(index)
            return
        if not accumulator.window.is_open:
            # Nothing ran backward: gradients left from an earlier step (the BatchNorm
            # epoch of StochasticWeightAveraging) must not be stepped with again.
            clear_gradients(optimizer)
            return
        if not self.batch_is_unfinished and self.scaler is not None:
            refusals.refuse_none_on_last_micro_batch()
        if self._num_closed > 1:
            refusals.refuse_second_closure(optimizer, self._num_closed)
        self.close(trainer, index)

    def close(self, trainer: Any, index: int, *others: int) -> WindowStats:
        """Divide an optimizer's window; used by `finish_window` as well.

        Args:
            trainer: the Trainer.
            index: the optimizer that the window belongs to.
            others: further optimizers that train on these losses.
        """
        assert self.driver is not None
        accumulator = self.accumulators[index]
        for each in (index, *others):
            self._divided.add(each)
            if self.scaler is not None:
                self._skipped[each].expect_step()
        self.gradients_are_fresh = False
        # A closure that runs again runs all micro-batches of a split window again.
        split, held = self.driver.is_split, accumulator.window.num_micro_batches
        self._num_closed = 1 if split else held
        owners = trainer.optimizers[index]
        if others:
            listed = [parameters_of(trainer.optimizers[i]) for i in (index, *others)]
            owners = [parameter for each in listed for parameter in each]
        stats = self.driver.finish(accumulator, owners)
        counts_samples = split or self.counts_samples
        for each in (index, *others):
            self.windows[each] = stats
            self.ledger.waiting.append((each, stats, counts_samples))
        if len(self.ledger.waiting) >= NUM_WAITING:
            self.ledger.enter()
        return stats

    def _before_step(
        self, accumulator: Accumulator, optimizer: Any, args: Any, kwargs: Any
    ) -> None:
        _, closure, *_ = *args, kwargs.get("closure")  # the optimizer comes first
        if closure is None and accumulator.window.is_open:
            raise refusals.undivided_step(optimizer, accumulator)

    def _after_step(self, index: int, optimizer: Any, args: Any, kwargs: Any) -> None:
        accumulator = self.accumulators[index]
        if accumulator.window.is_open:  # its closure ran a backward pass
            raise refusals.undivided_step(optimizer, accumulator)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.batch_is_unfinished = False
        if self._pools.are_taken:
            self._pools.let_go()
        if self.scaler is not None:
            for each in self._skipped:
                each.count_step()

    # ---- where a window ends early ---------------------------------------------------

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if not self.driver.keeps_gradients():
            self._drop(ZEROED)
            self.gradients_are_fresh = True

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        refusals.refuse_early_end(trainer, self._meeting_point)
        if pl_module.automatic_optimization:
            self._drop("the epoch ended inside it")
            self._pools.drop("the epoch ended before it was full")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._stop(trainer, pl_module)
        self._drop("training ended inside it")
        self._pools.drop("training ended before it was full")
        for accumulator in self.accumulators.values():
            accumulator.watch.read_all()

    def on_exception(
        self, trainer: Any, pl_module: Any, exception: BaseException
    ) -> None:
        self._stop(trainer, pl_module)
        held = [a.num_micro_batches for a in self.accumulators.values() if a.is_open]
        if held and not isinstance(exception, Stopped):
            # This only warns: a checkpoint that is written because of the exception
            # may still save the window. The next fit forgets it.
            say_dropped(sum(held), f"{type(exception).__name__} ended training")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Release what the `fit` has held; only its numbers stay."""
        # A finder that leaves `fit` early calls this hook alone.
        self._stop(trainer, pl_module)
        self.scaler = self.weight = self._meeting_point = None
        closed, self.accumulators = self.accumulators, {}
        for index, each in closed.items():  # as many windows, and no module
            emptied = Accumulator(each.strategy, aggregation="none")
            emptied.num_windows = each.num_windows
            self.accumulators[index] = emptied

    def _stop(self, trainer: Any, pl_module: Any) -> None:
        """Give back what was taken for a `fit`."""
        self._taken.close()
        for shared in self._shared:
            shared.remove()
        for each in filter(None, (self.driver, self.inside)):
            each.stop()
        for each in self._skipped:
            each.close()
        for hook in self._step_hooks:
            hook.remove()
        self._step_hooks.clear()
        self._pools.end(trainer)

    def _drop(self, why: str) -> None:
        for accumulator in self.accumulators.values():
            if accumulator.window.is_open:
                self.gradients_are_fresh = False
                held = accumulator.drop()
                if accumulator.ranks.index == 0:
                    say_dropped(held, why)

    # ---- checkpoints -----------------------------------------------------------------

    def on_save_checkpoint(
        self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        torn = 0
        if self.batch_is_unfinished and self.driver is not None:
            # A resumed run repeats the micro-batch that is under way, so its gradient
            # must not be saved, and it cannot be taken out of the sum.
            held = sum(a.num_micro_batches for a in self.accumulators.values())
            # Loader batches that wait for others are saved.
            torn = 1 if self.is_split else held or self._num_closed
        checkpoint[open_window.KEY] = open_window.save(
            self.accumulators, pl_module, num_torn=torn, alone=trainer.interrupted
        )
        checkpoint[open_window.KEY]["ledger"] = self.ledger.state_dict()
        found = self.inside if self.inside is not None else self.split
        if found is not None and (state := found.state_dict()) is not None:
            checkpoint[KEY] = state
        self._pools.save(trainer, checkpoint)

    def on_load_checkpoint(
        self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        self._found = checkpoint.get(KEY)
        self._pools.load(trainer, checkpoint)
        self._restored = checkpoint.get(open_window.KEY)
        if self._restored is None:
            num_expected = trainer.accumulate_grad_batches
            self._restored = open_window.without_state(checkpoint, num_expected)
        if trainer.state.fn == "fit":  # else a test of another checkpoint
            saved = checkpoint.get(open_window.KEY) or {}
            self.ledger.load_state_dict(saved.get("ledger", {}))
