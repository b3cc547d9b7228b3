"""The window callback for a module that somebody else wrote."""

from __future__ import annotations

from typing import Any

from trainkit.core.checks import Checks
from trainkit.core.ranks import Aggregation
from trainkit.core.split.micro_batching import MicroBatching, is_inside
from trainkit.core.strategies import AccumulationStrategy, Strategies, Uniform
from trainkit.errors import TrainkitError
from trainkit.lit.callback.said_weight import refuse_unsaid_weight
from trainkit.lit.proof.verdict import Proof
from trainkit.lit.windows import refusals
from trainkit.lit.windows.callback import WindowCallback


class AccumulationCallback(WindowCallback):
    """Exact gradient accumulation for a `LightningModule` you did not write.

        Trainer(accumulate_grad_batches=8, callbacks=[AccumulationCallback(PerToken())])

    Args:
        accumulation: says what a micro-batch weighs: a strategy, or for a loss of
            several terms a dict of strategies by the terms' names.
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
        strategy: another name for `accumulation`.
        proof: what follows if a window is found not to be the big batch, on a few rows
            of the first batch: `"warn"` warns; `"require"` refuses to train, also if it
            cannot be measured; `"off"` measures nothing.
    """

    def __init__(
        self,
        accumulation: AccumulationStrategy | Strategies | None = None,
        *,
        aggregation: Aggregation = "auto",
        checks: Checks = "late",
        wide_gradients: bool = False,
        micro_batching: MicroBatching | None = None,
        hold_schedulers: bool = False,
        strategy: AccumulationStrategy | Strategies | None = None,
        proof: Proof = "warn",
    ) -> None:
        if accumulation is not None and strategy is not None:
            raise TrainkitError(
                f"AccumulationCallback: accumulation and strategy are two names of one "
                f"option, received {accumulation!r} and {strategy!r}. Leave one out."
            )
        chosen = strategy if accumulation is None else accumulation
        self.has_strategy = chosen is not None
        if not self.has_strategy and is_inside(micro_batching):
            chosen = Uniform()
        refusals.refuse_no_strategy(chosen, "AccumulationCallback: accumulation")
        super().__init__(
            chosen,
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
        refuse_unsaid_weight(pl_module, self.strategies)
        super().on_train_start(trainer, pl_module)
