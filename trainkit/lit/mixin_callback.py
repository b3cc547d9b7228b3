"""The callback that a mixin module brings."""

from __future__ import annotations

from typing import Any

from trainkit.core.ranks import find_ranks
from trainkit.lit.callback import WindowCallback
from trainkit.lit.exact_log import ExactMeans


class MixinCallback(WindowCallback):
    """The callback that a mixin module brings."""

    def __init__(self, module: Any, mixin: type) -> None:
        super().__init__(
            module.accumulation,
            aggregation=module.accumulation_aggregation,
            checks=module.accumulation_checks,
        )
        self.means = ExactMeans()
        self._mixin = mixin
        self._taken: int | None = None
        asked = module.trainer.accumulate_grad_batches
        if asked != 1 and not module.automatic_optimization:
            # Lightning refuses `accumulate_grad_batches` in manual optimization, where
            # nothing of its own would heed it; `window_ends` does. It looks between
            # the making of this callback and its `setup`, which gives the number back.
            self._taken = asked
            module.trainer.accumulate_grad_batches = 1

    def _forget(self) -> None:
        super()._forget()
        self.is_apart: dict[int, bool] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._give_back_window_size(trainer)
        if isinstance(pl_module, self._mixin):
            super().setup(trainer, pl_module, stage)
        else:  # left in the list by the module of an earlier fit
            trainer.callbacks = [c for c in trainer.callbacks if c is not self]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.strategy = pl_module.accumulation  # perhaps chosen in its setup()
        super().on_train_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_epoch_start(trainer, pl_module)
        self.means.open("train")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        self._log_means(trainer, pl_module, "train")

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.means.open("validate")

    def on_test_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.means.open("test")

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._log_means(trainer, pl_module, "validate")

    def on_test_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._log_means(trainer, pl_module, "test")

    def on_exception(
        self, trainer: Any, pl_module: Any, exception: BaseException
    ) -> None:
        super().on_exception(trainer, pl_module, exception)
        self._give_back_window_size(trainer)

    def _give_back_window_size(self, trainer: Any) -> None:
        if self._taken is not None:
            trainer.accumulate_grad_batches, self._taken = self._taken, None

    def _log_means(self, trainer: Any, pl_module: Any, stage: str) -> None:
        # "mean": outside of fit nothing is wrapped; only the group matters here.
        self.means.log(pl_module, stage, find_ranks(trainer.strategy, "mean"))
