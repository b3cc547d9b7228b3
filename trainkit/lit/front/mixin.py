"""The mixin for a LightningModule of your own."""

from __future__ import annotations

import functools
from inspect import getattr_static
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainkit.core.checks import Checks
from trainkit.core.plan.effective_batch import EffectiveBatch
from trainkit.core.ranks import Aggregation
from trainkit.core.said_weight import Weighed, said_weight
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.strategies import (
    AccumulationStrategy,
    Strategies,
    Weight,
    checked_weight,
)
from trainkit.core.terms import leading
from trainkit.core.window import WindowStats, scalar
from trainkit.errors import TrainkitError
from trainkit.lit._compat import current_hook, is_scaled, scaler_of
from trainkit.lit.batch_size import read_effective_batch
from trainkit.lit.callback.base import find_callback, window_ends
from trainkit.lit.front.callbacks import (
    CALLBACKS,
    MixinCallback,
    MixinCallbacks,
    strategies_of,
)
from trainkit.lit.proof.report import Proof
from trainkit.lit.windows.callback import WindowCallback

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule as _Base
else:
    _Base = object


class AccumulationMixin(_Base):
    """Exact gradient accumulation for a `LightningModule` of your own.

        class MyModule(AccumulationMixin, LightningModule):
            def __init__(self):
                super().__init__()
                self.accumulation = PerToken()

    The mixin stands before `LightningModule`. It brings the callback that does the
    work; no hook of the module divides anything.

    Attributes:
        accumulation: says what a micro-batch weighs; for a loss of several terms, a
            dict of strategies by the terms' names. Without one `fit` refuses, but
            for an inner cut. It stays the same while `fit` runs.
        micro_batching: cuts each loader batch, which is then one optimizer step.
        checks: `"late"`, or `"now"` to refuse before a bad step is taken.
        wide_gradients: True keeps the window's gradient in float32 beside parameters of
            half precision (`precision="bf16-true"`), and rounds it once.
        hold_schedulers: True keeps a learning-rate scheduler with `interval="step"`
            where it is when a gradient scaler has skipped the optimizer's step.
            Lightning moves it, and `global_step`, all the same. An `lr_scheduler_step`
            of your own is then not called either.
        accumulation_aggregation: `aggregation` of `AccumulationCallback`: what the
            backend does to gradients across ranks, where the Trainer's strategy does
            not show it. Layers of graph networks have an `aggregation` of their own,
            with the very values "mean" and "sum"; hence the longer name.
        proof: what follows if a window is found not to be the big batch, on a few rows
            of the first batch: `"warn"`, `"require"` to refuse, or `"off"`.
    """

    accumulation: AccumulationStrategy | Strategies | None = None
    micro_batching: MicroBatching | None = None
    checks: Checks = "late"
    wide_gradients: bool = False
    hold_schedulers: bool = False
    proof: Proof = "warn"
    accumulation_aggregation: Aggregation = "auto"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _refuse_wrong_order(cls)
        hook = getattr_static(cls, CALLBACKS, None)  # none without a LightningModule
        if callable(hook):
            setattr(cls, CALLBACKS, MixinCallbacks(hook))

    @property
    @torch.jit.unused
    def effective_batch(self) -> EffectiveBatch:
        """How many samples one optimizer step sees, over all ranks. To be asked in
        `fit`; in `configure_optimizers` already."""
        return read_effective_batch(self.trainer)

    # ---- weights ---------------------------------------------------------------------

    def weigh(self, number: Weight) -> None:
        """Say in `training_step` what its loss divides by, for `Weighed()`.

        Without a window (in validation, in a finder's search) it is not used.

        Args:
            number: a number, or a 0-d tensor, which stays on its device.
        """
        try:
            trainer = self.trainer
        except (RuntimeError, AttributeError):  # not attached to one, or in Fabric
            said_weight(number, "self.weigh(n)")
            return
        windows = find_callback(trainer, MixinCallback)
        if windows is not None and trainer.training:
            windows.said.say(number, windows.strategy, current_hook(self))

    # ---- logging ---------------------------------------------------------------------

    def log(
        self, name: str, value: Any, *args: Any, weight: Any = None, **kwargs: Any
    ) -> None:
        """Log a value, as Lightning's `log` does.

        In split windows, the values that a loader batch's micro-batches log are
        combined into the value that the whole batch would have logged, once.

        Args:
            name: of the value.
            value: a number, a 0-d tensor or a metric object.
            *args: as Lightning's.
            weight: by what a mean over a micro-batch is weighed there, where that is
                not what weighs the loss: a number, a strategy, or the name of a term.
            **kwargs: as Lightning's.
        """
        super().log(name, value, *args, **kwargs)

    # ---- manual optimization ---------------------------------------------------------

    def accumulate(
        self,
        loss: Tensor,
        batch: Any = None,
        *,
        optimizer: Any = None,
        weight: Weight | None = None,
        **backward_options: Any,
    ) -> None:
        """Run a micro-batch's backward pass, weighted, into an optimizer's window.

        With several optimizers each has a window of its own; use `toggle_optimizer` as
        usual, so that one's loss leaves no gradient in the other's parameters.

        Args:
            loss: what the strategy's `loss_reduction` says, undivided.
            batch: what the strategy weighs.
            optimizer: whose window; needed when there are several.
            weight: the weight itself, in place of `batch`. It comes before what
                `self.weigh` has said, which is for the next loss without one.
            **backward_options: passed to `manual_backward`, such as `retain_graph`.
        """
        self._refuse_in_automatic("accumulate")
        windows = self._windows()
        index = self._index(windows, optimizer)
        windows.refuse_changes(self)
        strategy = windows.accumulators[index].strategy
        if weight is None and isinstance(strategy, Weighed):
            weight = windows.said.take(strategy, self, batch)
        windows.batch_is_unfinished = True
        accumulator = windows.accumulators[index]
        accumulator.backward(
            loss,
            batch,
            weight=weight,
            backward=functools.partial(self.manual_backward, **backward_options),
        )
        windows.is_apart[index] = accumulator.ranks.holds_back_gradients

    def window_ends(self, batch_idx: int) -> bool:
        """Whether a window closes with this batch: it is full, as the Trainer's
        `accumulate_grad_batches` says, or the epoch is over.

        If optimizers have windows of two lengths, the Trainer says the shorter, and the
        longer close with some of these, and with `self.trainer.is_last_batch`.

        Args:
            batch_idx: as `training_step` got it.
        """
        self._windows()
        trainer = self.trainer
        return window_ends(trainer, batch_idx, trainer.accumulate_grad_batches)

    def finish_window(self, optimizer: Any = None) -> WindowStats:
        """Close an optimizer's window: its gradients become the big batch's gradients.

        Then clip, `optimizer.step()` and `optimizer.zero_grad()` as usual.

        Args:
            optimizer: whose window; needed when there are several. Where one loss
                trains the parameters of several optimizers, a list: the first is the
                one that `accumulate` named.
        """
        self._refuse_in_automatic("finish_window")
        windows = self._windows()
        listed = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        index, *others = [self._index(windows, each) for each in listed]
        if windows.is_apart.get(index):
            raise TrainkitError(
                f"finish_window(): the last micro-batch of optimizer {index} was "
                f"accumulated under no_sync(), so the ranks' gradients are still "
                f"apart. Leave no_sync() out, at least for a window's last one."
            )
        return windows.close(self.trainer, index, *others)

    def clip_gradients(
        self,
        optimizer: Any,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip gradients, also in `training_step` under a gradient scaler.

        There the gradients still carry the scaler's factor (lightning#18089), and the
        limit is multiplied by it.
        """
        scaler = None if self.fabric else scaler_of(self.trainer)
        if gradient_clip_val and scaler is not None and is_scaled(scaler, optimizer):
            gradient_clip_val *= scaler.get_scale()
        super().clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def _refuse_in_automatic(self, name: str) -> None:
        if self.automatic_optimization:
            raise TrainkitError(
                f"{name}(): it is for manual optimization. With "
                f"automatic_optimization=True return the loss from training_step; the "
                f"window is weighted and divided by itself."
            )

    def _index(self, windows: WindowCallback, optimizer: Any) -> int:
        if optimizer is not None:
            return windows.index_of(self.trainer, optimizer)
        if len(windows.accumulators) != 1:
            raise TrainkitError(
                f"optimizer: must be named where there are several, and there are "
                f"{len(windows.accumulators)}. Pass optimizer=, one of "
                f"self.optimizers()."
            )
        return 0

    # ---- evaluation ------------------------------------------------------------------

    def log_exact(
        self,
        name: str,
        loss: Tensor | float,
        batch: Any = None,
        *,
        weight: Weight | None = None,
        prog_bar: bool = False,
        logger: bool | None = None,
    ) -> None:
        """Log a mean with the strategy's weights, over all batches and ranks.

        By itself `self.log` weighs an epoch's means by rows, or by nothing. One name is
        one mean: with several loaders, put the loader's index into it. All ranks log
        the same names in the same order, as with `sync_dist=True`. `ExactResume` lets
        an epoch that is resumed in its middle have the mean of all its batches. Rows
        that Lightning's distributed sampler repeats to make ranks even count twice.

        Args:
            name: under which the mean is logged when the epoch ends.
            loss: what the strategy's `loss_reduction` says.
            batch: what the strategy weighs.
            weight: the weight itself, in place of `batch`. With `Weighed()` it is what
                `self.weigh` has said before, in `training_step`.
            prog_bar: also show it in the progress bar.
            logger: send it to the loggers; default: if there are any.
        """
        strategy = leading(strategies_of(self))
        windows = self._find_windows()
        if windows is None:
            return  # lr_find and scale_batch_size run without callbacks
        if weight is None:
            if self.accumulation is None:  # for an inner cut
                raise TrainkitError(
                    f"log_exact({name!r}): without self.accumulation nothing says what "
                    f"a batch weighs in the mean, and batches may have different "
                    f"numbers of rows. Pass weight=, as weight=len(x) for a mean over "
                    f"rows."
                )
            is_said = isinstance(strategy, Weighed)
            weight = windows.said.look() if is_said else strategy.weight(batch)
        weight = scalar(checked_weight(weight), self.device)
        mean = torch.as_tensor(loss).detach().to(weight)
        if strategy.loss_reduction != "mean":
            mean = mean / weight
        # Lightning divides the sum of value x batch_size by the sum of batch_size, over
        # all ranks; windows that are cut go by `weight`.
        self.log(
            name,
            torch.where(weight == 0, 0, mean),  # a mean over nothing is NaN
            on_step=False,
            on_epoch=True,
            batch_size=weight,
            weight=weight,
            sync_dist=True,
            add_dataloader_idx=False,
            prog_bar=prog_bar,
            logger=logger,
        )

    def _find_windows(self) -> MixinCallback | None:
        return find_callback(self.trainer, MixinCallback)

    def _windows(self) -> MixinCallback:
        found = self._find_windows()
        if found is not None:
            return found
        raise TrainkitError(
            f"{type(self).__name__}: the callback that its AccumulationMixin brings is "
            f"not among trainer.callbacks. lr_find and scale_batch_size take callbacks "
            f"out while they run: nothing is weighted meanwhile, and manual "
            f"optimization cannot run under them."
        )


def _refuse_wrong_order(cls: type) -> None:
    order = [base.__name__ for base in cls.__mro__]
    if "LightningModule" not in order:
        return
    if order.index("LightningModule") < order.index("AccumulationMixin"):
        raise TrainkitError(
            f"class {cls.__name__}: AccumulationMixin must come before "
            f"LightningModule, whose hooks hide the mixin's otherwise. Write "
            f"class {cls.__name__}(AccumulationMixin, LightningModule)."
        )
