"""Base of trainkit's callbacks: their order, and one table for all."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException

from trainkit.core.accumulator import Accumulator
from trainkit.core.batch_norm.layers import BatchNorm
from trainkit.core.inside.rows import Sizes
from trainkit.core.ledger import Ledger
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.strategies import AccumulationStrategy, Strategies, Weight
from trainkit.core.tape.forward import TapedForward
from trainkit.core.terms import leading
from trainkit.core.window import WindowStats
from trainkit.errors import TrainkitError
from trainkit.lit._compat import replaced, unwrapped
from trainkit.lit.callback.said_weight import SaidWeight
from trainkit.lit.callback.table import Row, show

Found = TypeVar("Found")

ZEROED = "optimizer_step left its step out, or accumulate_grad_batches has changed"


def window_ends(trainer: Any, batch_idx: int, num_expected: int) -> bool:
    """Whether the window closes with this batch: it is full, or the epoch is over."""
    return (
        (batch_idx + 1) % num_expected == 0
        or trainer.is_last_batch
        or batch_idx + 1 == trainer.num_training_batches
    )


def say_dropped(held: int, why: str = ZEROED) -> None:
    warnings.warn(
        f"accumulation: an open window of {held} micro-batch{'es' * (held != 1)} was "
        f"dropped, since {why}; no optimizer step was taken with it.",
        stacklevel=3,
    )


def without_module(callback: Any) -> dict[str, Any]:
    """A callback's attributes without the module's logging methods, which Lightning
    gives to every callback in `fit`: with them a pickle would hold the module."""
    held = vars(callback).items()
    return {name: value for name, value in held if name not in ("log", "log_dict")}


class OrderedCallback(Callback):
    """A callback that stands before all others, and in a fixed place among ours.

    The size of a window is settled first, then its gradients, then what follows from
    its size; every other callback, such as `LearningRateMonitor`, sees all of it done.

    Attributes:
        order: the lower, the earlier.
        on_cut: None, or a method that is called with the number of micro-batches of
            the loader batch that runs next; once more if that is cut anew.
    """

    order: int
    on_cut: Any = None

    def _forget(self) -> None:
        """Clear what belongs to one `fit`; nothing that a copy shares is changed."""

    def __getstate__(self) -> dict[str, Any]:
        """What was said to it: a Trainer can be pickled with it, in a `fit` too, and a
        copy begins anew."""
        copied = object.__new__(type(self))
        vars(copied).update(without_module(self))
        copied._forget()
        return vars(copied)

    def move_to_front(self, trainer: Any) -> None:
        """To be called in `setup`."""
        ours = [c for c in trainer.callbacks if isinstance(c, OrderedCallback)]
        others = [c for c in trainer.callbacks if not isinstance(c, OrderedCallback)]
        # A new list: Lightning is walking through the old one to call `setup`.
        trainer.callbacks = [*sorted(ours, key=lambda c: c.order), *others]

    @abstractmethod
    def table_rows(self, trainer: Any, pl_module: Any) -> list[Row]:
        """The callback's rows in the table before training."""

    def on_window_finished(self, trainer: Any, index: int) -> None:
        """`finish_window` has divided the window of an optimizer; what manual
        optimization does to its gradients next, such as clipping, is not done yet."""

    def show_table(
        self, trainer: Any, pl_module: Any, *, is_late: bool = False
    ) -> None:
        """To be called at the end of `on_train_start`: the last of ours to be ready
        shows the table of all.

        Args:
            trainer: in `fit`.
            pl_module: the module that trains.
            is_late: whether `on_train_start` is over, and the table may be shown.
        """
        if not trainer.is_global_zero:
            return
        ours = [c for c in trainer.callbacks if isinstance(c, OrderedCallback)]
        if ours[-1] is self:
            rows = [row for each in ours for row in each.table_rows(trainer, pl_module)]
            show(rows)
        elif is_late:
            show(self.table_rows(trainer, pl_module))


class WindowOwner(OrderedCallback):
    """The callback that weighs and divides windows, as the others know it.

    Attributes:
        accumulators: one for each optimizer, by its index.
        windows: the window that closed last, of each optimizer.
        ledger: what all closed windows of the training add up to.
        strategies: say what a micro-batch weighs in each term of the loss.
        driver: runs micro-batches, streamed or split; None outside of `fit`.
        scaler: the Trainer's gradient scaler, if there is one.
        weight: what the micro-batch under way weighs, in a streamed window.
        said: what the module says that its loss weighs.
        counts_samples: whether somebody wants the samples of all windows.
        inside: the submodules that run in chunks of rows, if some do.
        has_strategy: whether somebody has said what a micro-batch weighs. Without, a
            window is one loader batch of each rank, and these count alike.
        micro_batching: how the user lets loader batches be cut.
        shares_statistics: whether BatchNorm sees whole windows, so that no micro-batch
            has a gradient of its own.
        hold_schedulers: whether schedulers hold their place after a skipped step.
        moved_inside: the same cut inside of the step, where exact BatchNorm needs it.
        batch_is_unfinished: whether the batch under way has begun a backward pass.
        gradients_are_fresh: whether they were zeroed since the last window ended.
    """

    order = 1
    micro_batching: MicroBatching | None = None
    split: Any = None
    proof: Any = "warn"
    wide_gradients = hold_schedulers = False
    has_strategy = True

    def __init__(self, strategies: Strategies) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.strategies = strategies
        self._forget()

    def _forget(self) -> None:
        self.accumulators: dict[int, Accumulator] = {}
        self.windows: dict[int, WindowStats] = {}
        self.driver: Any = None
        self.inside: Any = None
        self.weight: Weight | None = None
        self.said = SaidWeight()
        self.scaler: Any = None
        self._shared: list[TapedForward] = []
        self.counts_samples = self.shares_statistics = False
        self.batch_is_unfinished = self.gradients_are_fresh = False
        self.moved_inside: MicroBatching | None = None
        self._skipped: list[Any] = []
        self._step_hooks: list[Any] = []
        self._taken, self._may_search = ExitStack(), False

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "ledger": Ledger()}

    @property
    def strategy(self) -> AccumulationStrategy:
        """The rule that weighs a micro-batch; with several terms, the first term's."""
        return leading(self.strategies)

    @property
    def last_window(self) -> WindowStats | None:
        """The window that closed last, where there is one optimizer."""
        return self.windows.get(0)

    @property
    def is_split(self) -> bool:
        """Whether it cuts loader batches, and so looks at the micro-batches itself."""
        return self.cut is not None and self.cut.inside is None

    @property
    def cut(self) -> Any:
        """How loader batches are cut: as the user says it, or inside the step where
        exact BatchNorm needs that."""
        return self.moved_inside or self.micro_batching

    @property
    def num_skipped_steps(self) -> int:
        """Optimizer steps that a gradient scaler has skipped since `fit` began."""
        return sum(each.num_skipped for each in self._skipped)

    def skipped_last_step(self, index: int = 0) -> bool:
        """Whether the last step of an optimizer was skipped by the gradient scaler."""
        return self._skipped[index].skipped_last

    @property
    def micro_batch_size(self) -> int | None:
        """The size limit of a micro-batch, if training finds it itself; else None."""
        if self.inside is not None:
            return self.inside.size
        return None if self.driver is None else self.driver.size

    def index_of(self, trainer: Any, optimizer: Any) -> int:
        """The optimizer's index among the Trainer's optimizers."""
        wanted = unwrapped(optimizer)
        for index, candidate in enumerate(trainer.optimizers):
            if unwrapped(candidate) is wanted:
                return index
        raise TrainkitError(
            f"optimizer: must be one that configure_optimizers returned, received "
            f"{type(wanted).__name__}. Take it from self.optimizers()."
        )

    def _take(self, trainer: Any, owner: Any, **mine: Callable[..., Any]) -> None:
        """Let Lightning call our methods in place of an object's own, until training
        ends. Methods of its strategy object run right around `training_step`, after all
        hooks that may edit the batch; no hook of a callback runs there."""
        calls = mine
        if self._may_search:
            calls = {
                name: partial(self._call, trainer, own, getattr(owner, name))
                for name, own in mine.items()
            }
        self._taken.enter_context(replaced(owner, **calls))

    def _call(
        self, trainer: Any, own: Any, plain: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Call our method; or Lightning's, while one of its finders has taken all
        callbacks out, which was announced before training."""
        if self in trainer.callbacks:
            return own(*args, **kwargs)
        each = self.accumulators.values()
        if held := sum(a.num_micro_batches for a in each if a.is_open):
            raise TrainkitError(
                f"trainer.callbacks: {type(self).__name__} was taken out of it, inside "
                f"a window of {held} micro-batches so far. A search by one of "
                f"Lightning's finders may do so between two windows, for example in "
                f"on_train_epoch_start; nothing else may."
            )
        return plain(*args, **kwargs)

    def join_statistics(self, pl_module: Any) -> None:
        """Let BatchNorm see whole windows, each of one loader batch, until training
        ends."""
        ranks = self.accumulators[0].ranks
        if self.inside is not None:
            self.inside.join_statistics(ranks)
        self._shared = [
            TapedForward(each, Sizes(), ranks, name)
            for name, each in pl_module.named_modules()
            if isinstance(each, BatchNorm) and ranks.size > 1
        ]
        for each in self._shared:
            each.install()
        self.shares_statistics = True

    @contextmanager
    def bare(self) -> Iterator[None]:
        """A context in which the module is as its author wrote it, to be copied."""
        replaced = [*self._shared, *([] if self.inside is None else self.inside.cuts)]
        for each in reversed(replaced):
            each.remove()
        try:
            yield
        finally:
            for each in replaced:
                each.install()

    @abstractmethod
    def close(self, trainer: Any, index: int, *others: int) -> WindowStats:
        """Divide the window of an optimizer, and of others that share its loss."""


def no_callbacks() -> list[Any]:
    """A `configure_callbacks` of a module that brings none."""
    return []


def find_callback(trainer: Any, kind: type[Found]) -> Found | None:
    """The first of the Trainer's callbacks that is of a class, or None."""
    return next((c for c in trainer.callbacks if isinstance(c, kind)), None)


def windows_of(trainer: Any) -> WindowOwner | None:
    """The callback that divides windows, or None."""
    return find_callback(trainer, WindowOwner)


def has_callback(callbacks: Iterable[Any], *names: str) -> bool:
    """Whether one of Lightning's callbacks is there, of either of its namespaces."""
    return any(
        cls.__name__ in names for each in callbacks for cls in type(each).__mro__
    )


def has_schedule(trainer: Any) -> bool:
    """Whether a callback changes how many micro-batches a window has."""
    names = "AccumulationSchedule", "GradientAccumulationScheduler"
    return has_callback(trainer.callbacks, *names)


def is_rehearsal(trainer: Any) -> bool:
    """Whether it trains a copy for one step, for the proof."""
    return getattr(trainer, "is_rehearsal", False)


class Stopped(SIGTERMException):
    """Ends a run that was asked to stop; its state is saved, open windows included.

    It is a `SystemExit`: where nobody catches it, the process ends with its status.
    """
