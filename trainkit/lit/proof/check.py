"""`check`: is a window of this module the big batch, and if not, why?"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from trainkit.core.joins.engine import Memory
from trainkit.core.joins.intercepted import installed
from trainkit.core.joins.layers import Sharing
from trainkit.core.joins.steps import JoinedSteps
from trainkit.core.split.micro_batching import MicroBatching, is_inside
from trainkit.core.terms import named_strategies
from trainkit.core.whole_number import check_whole_number
from trainkit.errors import TrainkitError
from trainkit.lit._compat import leaves_fit
from trainkit.lit.batch_norm.guard import BatchNormGuard
from trainkit.lit.callback.said_weight import refuse_said_terms
from trainkit.lit.measure.by_hand import has_mixin
from trainkit.lit.measure.clean import communicates
from trainkit.lit.probe.fit_aside import fit_aside
from trainkit.lit.proof.inside import measured_inside
from trainkit.lit.proof.ranks import of_all_ranks
from trainkit.lit.proof.report import Report
from trainkit.lit.proof.rows import FewRows
from trainkit.lit.proof.verdict import measured
from trainkit.lit.rerun.quietly import without_advice


def check(
    module: Any,
    data: Any = None,
    *,
    strategy: Any = None,
    micro_batches: Any = None,
    trainer: Any = None,
    rows: int = 24,
) -> Report:
    """Measure whether windows of a module are the big batch, and say why not.

        report = trainkit.check(module, loader, strategy=PerToken())
        print(report)
        report.assert_exact()

    A few rows of your own data are run through `training_step` as one batch and in
    parts, and the gradients are compared. Weights, buffers, optimizers, random states
    and loaders are as before afterwards, and nothing is logged.

    Args:
        module: any LightningModule, with trainkit's mixin or without.
        data: a training loader, a data module, or one batch.
        strategy: what a micro-batch weighs. Default: that of the module or of the
            Trainer's callback; without one, the plain mean of micro-batches, as
            Lightning accumulates.
        micro_batches: a `MicroBatching`, if windows are split; default as for strategy.
        trainer: the Trainer that is to train, for its hooks, precision and device.
        rows: how many rows to use at most.
    """
    check_whole_number("check rows", rows)
    with without_advice():
        return _checked(module, data, strategy, micro_batches, trainer, rows)


def _checked(
    module: Any, data: Any, strategy: Any, micro_batches: Any, trainer: Any, rows: int
) -> Report:
    trainer = trainer or _trainer()
    checked = _Check(
        strategy=_option(strategy, "accumulation", "strategy", module, trainer),
        options=_option(
            micro_batches, "micro_batching", "micro_batching", module, trainer
        ),
        most=rows,
        callbacks=trainer.callbacks,
    )
    fit_aside(
        trainer,
        module,
        _as_loader(data),
        checked,
        # A module that optimizes by itself is refused otherwise.
        prepare=lambda: setattr(trainer, "accumulate_grad_batches", 1),
    )
    if checked.report is None:
        raise TrainkitError(
            "check: the Trainer ran no batch. Look for limit_train_batches=0 or an "
            "empty loader."
        )
    return checked.report


def _trainer() -> Trainer:
    return Trainer(
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=1,
    )


def _option(
    given: Any, of_module: str, of_callback: str, module: Any, trainer: Any
) -> Any:
    """An option as it is given, or as the module or the Trainer's callback has it."""
    if given is not None:
        return given
    # In a module without the mixin, nothing reads such an attribute.
    found = getattr(module, of_module, None) if has_mixin(module) else None
    if found is not None:
        return found
    for callback in trainer.callbacks:
        found = getattr(callback, of_callback, None)
        if found is not None:
            return found
    return None


def _as_loader(data: Any) -> Any:
    """What `fit` takes: a batch becomes a loader that yields it."""
    has_many = hasattr(data, "__iter__") and hasattr(data, "__len__")
    several = data.values() if isinstance(data, Mapping) else data
    is_several = isinstance(data, Mapping | list | tuple) and any(map(_loads, several))
    if not has_many or _loads(data) or is_several:
        return data
    return DataLoader([data], batch_size=None)  # type: ignore[arg-type]


def _loads(data: Any) -> bool:
    """Whether it is a data module, a loader, or Lightning's loader of several."""
    kinds = ("train_dataloader", "dataset", "loaders", "flattened")
    return isinstance(data, DataLoader) or any(hasattr(data, kind) for kind in kinds)


class _Check(Callback):
    """Measures before the first step, as the Trainer's only callback, and ends `fit`.

    Copies of the run's BatchNorm guards change the layers first.
    """

    def __init__(
        self,
        *,
        strategy: Any,
        options: MicroBatching | None,
        most: int,
        callbacks: Sequence[Any] = (),
    ) -> None:
        self._callbacks = list(callbacks)
        guards = [each for each in callbacks if isinstance(each, BatchNormGuard)]
        self._guards = [copy.deepcopy(each) for each in guards]
        self._strategies = None if strategy is None else named_strategies(strategy)
        self._options, self._most = options, most
        self.report: Report | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        for guard in self._guards:
            guard.convert(pl_module, trainer)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if communicates(trainer, pl_module):
            raise TrainkitError(
                f"check: {type(trainer.strategy).__name__} or SyncBatchNorm "
                f"communicates within a pass, and parts of a batch would wait for "
                f"other ranks. Check with one device: "
                f"Trainer(devices=1, strategy='auto')."
            )
        for guard in self._guards:
            guard.freeze(trainer, pl_module)
        self.report = of_all_ranks(
            trainer, lambda: self._measured(trainer, pl_module, batch)
        )
        raise leaves_fit(trainer)

    def on_exception(
        self, trainer: Any, pl_module: Any, exception: BaseException
    ) -> None:
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        for guard in self._guards:
            guard.teardown(trainer, pl_module, stage)

    def _measured(self, trainer: Any, module: Any, batch: Any) -> Report:
        strategies = self._strategies or {}
        refuse_said_terms(strategies)
        memory: Memory | None = next((g.joins for g in self._guards if g.joins), None)
        rows = FewRows(
            trainer,
            module,
            batch,
            most=self._most,
            options=None if is_inside(self._options) else self._options,
            strategy=next(iter(strategies.values()), None),
            trims=memory is None,
        )
        if rows.num_rows < 2:
            raise TrainkitError(
                f"check: needs at least 2 rows to cut, and found {rows.num_rows}. Give "
                f"a loader or a batch with more rows, and leave rows= at its default."
            )
        if self._options is not None and is_inside(self._options):
            return measured_inside(module, rows, self._options, memory)
        joined = None if memory is None else JoinedSteps(module, memory, Sharing())
        with installed(joined):
            return measured(module, rows, strategies, self._callbacks, joined)
