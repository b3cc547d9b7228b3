"""The window callback for a module that somebody else wrote."""

from __future__ import annotations

from typing import Any

from trainkit.core.checks import Checks
from trainkit.core.ranks import Aggregation
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.strategies import AccumulationStrategy, Strategies
from trainkit.core.terms import named_strategies
from trainkit.lit.split.callback import SplitCallback
from trainkit.lit.windows import refusals


class AccumulationCallback(SplitCallback):
    """Exact gradient accumulation for a `LightningModule` you did not write.

        Trainer(accumulate_grad_batches=8, callbacks=[AccumulationCallback(PerToken())])

    Args:
        strategy: says what a micro-batch weighs.
        aggregation: what the backend does to gradients across ranks, where the
            Trainer's strategy does not show it: `"mean"`, `"sum"` or `"none"`.
        checks: `"late"` costs nothing and complains one window late; `"now"` waits for
            the device once a window and refuses before the step is taken.
        wide_gradients: keep the window's gradient in float32 beside parameters of half
            precision (`precision="bf16-true"`), and round it once.
        micro_batching: cuts each loader batch, which is then one optimizer step.
    """

    def __init__(
        self,
        strategy: AccumulationStrategy | Strategies,
        *,
        aggregation: Aggregation = "auto",
        checks: Checks = "late",
        wide_gradients: bool = False,
        micro_batching: MicroBatching | None = None,
    ) -> None:
        named_strategies(strategy)  # none at all is for a module that says it itself
        super().__init__(
            strategy,
            aggregation=aggregation,
            checks=checks,
            wide_gradients=wide_gradients,
        )
        self.micro_batching = micro_batching

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        refusals.refuse_manual_optimization(pl_module)
        super().on_train_start(trainer, pl_module)
