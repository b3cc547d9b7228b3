"""The callback that a mixin module brings, and the one for modules of others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

from trainkit.core.checks import Checks
from trainkit.core.nested import are_equal
from trainkit.core.ranks import Aggregation
from trainkit.core.split.micro_batching import MicroBatching, is_inside
from trainkit.core.strategies import AccumulationStrategy, Strategies, Uniform
from trainkit.core.terms import named_strategies
from trainkit.core.window import WindowStats
from trainkit.errors import TrainkitError
from trainkit.lit.callback.base import OrderedCallback
from trainkit.lit.proof.report import Proof
from trainkit.lit.windows import refusals
from trainkit.lit.windows.callback import WindowCallback

CALLBACKS = "configure_callbacks"


class MixinCallbacks:
    """A `configure_callbacks` that adds the mixin's callback to what a hook returns.

    None can be set on an instance, where it would hide it: as a descriptor this costs
    nothing, and a `__setattr__` would at each of Lightning's hooks.
    """

    def __init__(self, hook: Callable[[Any], Any]) -> None:
        @functools.wraps(hook)
        def configure_callbacks(module: Any) -> list[Any]:
            found: Any = hook(module)
            if not isinstance(found, Sequence):
                found = [found] if found else []
            has_ours = any(isinstance(each, MixinCallback) for each in found)
            return [*found] if has_ours else [*found, MixinCallback(module)]

        self._hook = configure_callbacks

    def __get__(self, module: Any, owner: Any = None) -> Callable[..., Any]:
        if module is None:
            return self._hook
        # A copy that the proof trains has one of its own.
        return vars(module).get(CALLBACKS) or MethodType(self._hook, module)

    def __set__(self, module: Any, value: Any) -> None:
        raise TrainkitError(
            f"{type(module).__name__}.{CALLBACKS}: it was set on the instance, where "
            f"it would hide the callback that AccumulationMixin brings, received "
            f"{value!r}. Define it in the class, or give the Trainer its callbacks."
        )


class MixinCallback(WindowCallback):
    """The callback that a mixin module brings."""

    def __init__(self, module: Any) -> None:
        super().__init__(
            module.accumulation,
            aggregation=module.accumulation_aggregation,
            checks=module.checks,
            wide_gradients=module.wide_gradients,
            proof=module.proof,
        )
        for each in module.trainer.callbacks:
            if isinstance(each, MixinCallback):
                # Of an earlier `fit`, which may be continued.
                self.ledger = each.ledger
        self.micro_batching = module.micro_batching
        self._asked: int | None = None
        asked = module.trainer.accumulate_grad_batches
        if asked != 1 and not module.automatic_optimization:
            # Lightning refuses `accumulate_grad_batches` in manual optimization, where
            # nothing of its own would heed it; `window_ends` does. It looks between
            # the making of this callback and its `setup`, which gives the number back.
            self._asked = asked
            module.trainer.accumulate_grad_batches = 1

    def _forget(self) -> None:
        super()._forget()
        self._chosen: Any = None
        self.is_apart: dict[int, bool] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._give_back_window_size(trainer)
        if hasattr(pl_module, "accumulation_aggregation"):
            super().setup(trainer, pl_module, stage)
        else:  # left in the list by the module of an earlier fit
            trainer.callbacks = [c for c in trainer.callbacks if c is not self]

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.state.fn == "fit":
            self._choose(pl_module)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._choose(pl_module)
        super().on_train_start(trainer, pl_module)

    def _choose(self, pl_module: Any) -> None:
        """Take over what the module says by now, perhaps in its `setup`."""
        self.strategies = strategies_of(pl_module)
        self.has_strategy = pl_module.accumulation is not None
        self.micro_batching = pl_module.micro_batching
        self.hold_schedulers = pl_module.hold_schedulers
        self._chosen = pl_module.accumulation

    def for_copy(self, module: Any, strategies: Any, options: Any) -> None:
        """Let windows of a module's copy be divided as those of the module, by a
        callback that the copy brings, and no other of the module's."""
        vars(module)[CALLBACKS] = lambda: [MixinCallback(module)]
        own = {"accumulation": strategies, "micro_batching": options}
        own |= {"proof": "off", "accumulation_aggregation": "auto"}
        kind = type(module)
        fixed = [n for n in own if isinstance(getattr(kind, n), property)]
        if fixed:  # the user's, perhaps without a setter
            named = {name: own.pop(name) for name in fixed}
            module.__class__ = type(kind.__name__, (kind,), named)
        for name, value in own.items():
            setattr(module, name, value)

    def refuse_changes(self, pl_module: Any) -> None:
        """Refuse what has been assigned to the module while `fit` runs."""
        if pl_module.micro_batching is not self.micro_batching:
            refusals.refuse_assigned(pl_module, "micro_batching", self.micro_batching)
        chosen = pl_module.accumulation
        if chosen is self._chosen and isinstance(chosen, AccumulationStrategy):
            return  # a dict may have been written into
        if not _are_alike(strategies_of(pl_module), self.strategies):
            refusals.refuse_assigned(pl_module, "accumulation", self.strategies)

    def close(self, trainer: Any, index: int, *others: int) -> WindowStats:
        stats = super().close(trainer, index, *others)
        if not trainer.lightning_module.automatic_optimization:
            for each in trainer.callbacks:
                if isinstance(each, OrderedCallback):
                    each.on_window_finished(trainer, index)
        return stats

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.refuse_changes(pl_module)
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_exception(
        self, trainer: Any, pl_module: Any, exception: BaseException
    ) -> None:
        super().on_exception(trainer, pl_module, exception)
        self._give_back_window_size(trainer)

    def _give_back_window_size(self, trainer: Any) -> None:
        if self._asked is not None:
            trainer.accumulate_grad_batches, self._asked = self._asked, None


def strategies_of(pl_module: Any) -> Strategies:
    """The strategies of a mixin module, by term."""
    if pl_module.accumulation is None and is_inside(pl_module.micro_batching):
        return named_strategies(Uniform())
    owner = f"{type(pl_module).__name__}.accumulation: a module with AccumulationMixin"
    refusals.refuse_no_strategy(pl_module.accumulation, owner)
    return named_strategies(pl_module.accumulation)


def _are_alike(some: Strategies, others: Strategies) -> bool:
    """Whether strategies are the same, also where a property makes them anew."""
    # From Python 3.13 on, dataclasses compare even the same tensor by its entries.
    return some.keys() == others.keys() and all(
        type(each) is type(others[name]) and are_equal(vars(each), vars(others[name]))
        for name, each in some.items()
    )


class AccumulationCallback(WindowCallback):
    """Exact gradient accumulation for a `LightningModule` you did not write.

        Trainer(accumulate_grad_batches=8, callbacks=[AccumulationCallback(PerToken())])

    Args:
        strategy: says what a micro-batch weighs; for a loss of several terms, a dict of
            strategies by the terms' names.
        aggregation: what the backend does to gradients across ranks, where the
            Trainer's strategy does not show it: `"mean"`, `"sum"` or `"none"`.
        checks: `"late"` costs nothing and complains one window late; `"now"` waits for
            the device once a window and refuses before the step is taken.
        wide_gradients: keep the window's gradient in float32 beside parameters of half
            precision (`precision="bf16-true"`), and round it once.
        micro_batching: cuts each loader batch, which is then one optimizer step. With
            `inside=` it needs no strategy.
        hold_schedulers: keep a learning-rate scheduler with `interval="step"` where it
            is when a gradient scaler has skipped the optimizer's step.
        proof: what follows if a window is found not to be the big batch, on a few rows
            of the first batch: `"warn"` warns; `"require"` refuses to train, also if it
            cannot be measured; `"off"` measures nothing.
    """

    def __init__(
        self,
        strategy: AccumulationStrategy | Strategies | None = None,
        *,
        aggregation: Aggregation = "auto",
        checks: Checks = "late",
        wide_gradients: bool = False,
        micro_batching: MicroBatching | None = None,
        hold_schedulers: bool = False,
        proof: Proof = "warn",
    ) -> None:
        self.has_strategy = strategy is not None
        if not self.has_strategy and is_inside(micro_batching):
            strategy = Uniform()
        refusals.refuse_no_strategy(strategy, "AccumulationCallback: strategy")
        super().__init__(
            strategy,
            aggregation=aggregation,
            checks=checks,
            wide_gradients=wide_gradients,
            proof=proof,
        )
        self.micro_batching = micro_batching
        self.hold_schedulers = hold_schedulers

    def for_copy(self, module: Any, strategies: Any, options: Any) -> Any:
        """The callback by which windows of a module's copy are divided as those of the
        module.

        Args:
            module: the copy, not yet in `fit`.
            strategies: what a micro-batch weighs, if anybody says so.
            options: a `MicroBatching`, if loader batches are cut.
        """
        return AccumulationCallback(
            strategies,
            micro_batching=options,
            wide_gradients=self.wide_gradients,
            proof="off",
        )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self.has_strategy:
            refusals.refuse_manual_optimization(pl_module)
        super().on_train_start(trainer, pl_module)
