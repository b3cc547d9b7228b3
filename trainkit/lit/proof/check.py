"""`check`: is a window of this module the big batch, and if not, why?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import nn
from torch.utils.data import DataLoader

from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.strategies import Strategies
from trainkit.core.terms import named_strategies
from trainkit.core.whole_number import check_whole_number
from trainkit.errors import TrainkitError
from trainkit.lit._compat import leaves_fit
from trainkit.lit.probe.fit_aside import fit_aside
from trainkit.lit.proof.causes import Causes
from trainkit.lit.proof.measure import Measurements, Parts
from trainkit.lit.proof.passes import Passes
from trainkit.lit.proof.report import Cut, Report
from trainkit.lit.proof.rows import FewRows


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
    trainer = trainer or _trainer()
    checked = _Check(
        strategy=_option(strategy, "accumulation", "strategy", module, trainer),
        options=_option(
            micro_batches, "micro_batching", "micro_batching", module, trainer
        ),
        most=rows,
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
    found = getattr(module, of_module, None)
    if found is not None:
        return found
    for callback in trainer.callbacks:
        found = getattr(callback, of_callback, None)
        if found is not None:
            return found
    return None


def _as_loader(data: Any) -> Any:
    is_loader = hasattr(data, "__iter__") and hasattr(data, "__len__")
    if data is None or hasattr(data, "train_dataloader"):
        return data
    if isinstance(data, DataLoader) or not is_loader or _is_loader(data):
        return data
    return DataLoader([data], batch_size=None)  # type: ignore[arg-type]


def _is_loader(data: Any) -> bool:
    return hasattr(data, "dataset") or hasattr(data, "loaders")


class _Check(Callback):
    """Measures before the first step, as the Trainer's only callback, and ends fit."""

    def __init__(
        self,
        *,
        strategy: Any,
        options: MicroBatching | None,
        most: int,
    ) -> None:
        self._strategies = None if strategy is None else named_strategies(strategy)
        self._options, self._most = options, most
        self.report: Report | None = None

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        _refuse_communicating(trainer, pl_module)
        report = self._measured(trainer, pl_module, batch)
        if not trainer.strategy.reduce_boolean_decision(report.exact, all=True):
            report = replace(report, exact=False)
        self.report = report
        raise leaves_fit(trainer)

    def _measured(self, trainer: Any, module: Any, batch: Any) -> Report:
        strategies = self._strategies or {}
        rows = FewRows(
            trainer,
            module,
            batch,
            most=self._most,
            options=self._options,
            strategy=next(iter(strategies.values()), None),
        )
        if rows.num_rows < 2:
            raise TrainkitError(
                f"check: needs at least 2 rows to cut, and found {rows.num_rows}."
            )
        try:
            return _report_of(module, rows, strategies, in_double=True)
        except TrainkitError:
            raise
        except Exception as error:  # an operation that knows no float64
            try:
                report = _report_of(module, rows, strategies, in_double=False)
            except TrainkitError:
                raise
            except Exception:
                raise TrainkitError(
                    f"check: training_step failed on {rows.num_rows} rows of the "
                    f"training data: {type(error).__name__}: {error}"
                ) from error
            note = f"measured in float32, since float64 failed: {error}"
            return replace(report, notes=(*report.notes, note))


def _refuse_communicating(trainer: Any, module: Any) -> None:
    """Refuse backends and layers that communicate within a pass: parts would wait."""
    kinds = {cls.__name__ for cls in type(trainer.strategy).__mro__}
    shards = not kinds & {"SingleDeviceStrategy", "DDPStrategy"}
    if shards or (
        trainer.world_size > 1
        and any(isinstance(each, nn.SyncBatchNorm) for each in module.modules())
    ):
        raise TrainkitError(
            f"check: {type(trainer.strategy).__name__} or SyncBatchNorm communicates "
            f"within a pass, and parts of a batch would wait for other ranks. Check "
            f"with one device: Trainer(devices=1, strategy='auto')."
        )


def _report_of(
    module: Any, rows: FewRows, strategies: Strategies, *, in_double: bool
) -> Report:
    passes = Passes(
        module, rows.num_rows, dtype=torch.float64 if in_double else torch.float32
    )
    with passes.prepared():
        return _report(Measurements(passes, rows), strategies)


def _report(found: Measurements, strategies: Strategies) -> Report:
    as_run = found.rows.as_run
    finest = [[row] for row in found.all_rows]
    cuts = [
        _cut(found, "parts", found.parts, strategies),
        _cut(found, "single rows", finest, strategies),
    ]
    off = max(cut.deviation for cut in cuts if cut.deviation is not None)
    if strategies:
        cuts.append(_cut(found, "plain accumulation", found.parts, {}))
    precision = "float64" if found.passes.dtype is torch.float64 else "float32"
    parameters = found.worst_parameters(as_run, strategies)
    rounding = found.tolerance
    causes = Causes(found, strategies)
    causes.look(is_off=off > rounding)
    is_moved = any(cause.kind == "state" for cause in causes.causes)
    return Report(
        exact=off <= rounding and not is_moved,
        deviation=off,
        rounding=rounding,
        num_rows=len(found.all_rows),
        precision=precision,
        cuts=tuple(cuts),
        parameters=tuple(parameters),
        causes=tuple(causes.causes),
        notes=tuple(causes.notes),
    )


def _cut(found: Measurements, name: str, parts: Parts, strategies: Strategies) -> Cut:
    sizes = tuple(len(rows) for rows in parts)
    try:
        off = found.off_by(parts, found.rows.as_run, strategies)
    except TrainkitError:
        raise
    except Exception as error:
        if name == "parts":
            raise TrainkitError(
                f"check: training_step ran on all {len(found.all_rows)} rows, and "
                f"failed on a part of them: {error}"
            ) from error
        return Cut(name, sizes, None, f"training_step fails on one row: {error}")
    return Cut(name, sizes, off)
