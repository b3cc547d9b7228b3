"""`check`: is a window of this module the big batch, and if not, why?"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from trainkit.core.batch_norm.layers import listed
from trainkit.core.plan.options import check_whole_number
from trainkit.core.split.micro_batching import MicroBatching, is_inside
from trainkit.core.strategies import Uniform
from trainkit.core.terms import named_strategies
from trainkit.errors import TrainkitError
from trainkit.lit._compat import leaves_fit
from trainkit.lit.aside import logged_from, without_advice
from trainkit.lit.batch_norm.exact import cut_inside
from trainkit.lit.front.callbacks import AccumulationCallback, MixinCallback
from trainkit.lit.front.mixin import AccumulationMixin
from trainkit.lit.inside.choose import choose
from trainkit.lit.probe.fit_aside import Aside, refuse_other_kinds
from trainkit.lit.proof.ending import may_trim
from trainkit.lit.proof.measure import (
    FULL_PRECISIONS,
    measured,
    of_all_ranks,
)
from trainkit.lit.proof.rehearse import Rehearsal
from trainkit.lit.proof.report import NotMeasured, Report, in_one_line
from trainkit.lit.proof.subject import Subject, as_given, subject_of
from trainkit.lit.proof.words import cause

PRECISIONS = torch.float64, torch.float32


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

    A few rows of your own data are trained on by copies of the module, as one batch
    and in parts, and the gradients are compared. The module, its Trainer, random states
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
    if not isinstance(micro_batches, MicroBatching | None):
        raise TrainkitError(
            f"check micro_batches: must be a MicroBatching, received {micro_batches!r}."
            f" For example micro_batches=MicroBatching(size=4)."
        )
    with without_advice():
        trainer = trainer or _trainer_for(module)
        refuse_other_kinds("check", trainer, module)
        own, cut = _options_of(module, trainer)
        strategy = own if strategy is None else strategy
        measure = _Check(trainer, strategy, micro_batches or cut, rows)
        try:
            Aside(trainer, module, _as_loader(data)).fit(measure)
        except NotMeasured as error:
            raise TrainkitError(f"check: not measured: {error}.") from error
    if measure.report is None:
        raise TrainkitError(
            "check: the Trainer ran no batch. Look for limit_train_batches=0, an empty "
            "loader, or max_epochs and max_steps that are reached already."
        )
    return measure.report


def _trainer_for(module: Any) -> Any:
    """A quiet Trainer of the package that a module's class comes from."""
    packages = {each.__module__.partition(".")[0] for each in type(module).__mro__}
    is_older = "pytorch_lightning" in packages
    kind = sys.modules["pytorch_lightning"].Trainer if is_older else Trainer
    return kind(
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=1,
    )


def _options_of(module: Any, trainer: Any) -> tuple[Any, MicroBatching | None]:
    """The strategy and the cut of a module or of the Trainer's callback."""
    # In a module without the mixin, nothing reads such attributes.
    if isinstance(module, AccumulationMixin):
        return module.accumulation, module.micro_batching
    for callback in trainer.callbacks:
        if isinstance(callback, AccumulationCallback):
            given = as_given(callback.strategies) if callback.has_strategy else None
            return given, callback.micro_batching
    return None, None


def _as_loader(data: Any) -> Any:
    """What `fit` takes: a batch becomes a loader that yields it."""
    has_many = hasattr(data, "__iter__") and hasattr(data, "__len__")
    several = data.values() if isinstance(data, Mapping) else data
    is_several = isinstance(data, Mapping | list | tuple) and any(map(_loads, several))
    if not has_many or _loads(data) or is_several:
        return data
    return DataLoader([data], batch_size=None)  # type: ignore[arg-type]


def _loads(data: Any) -> bool:
    """Whether it is a loader, or Lightning's loader of several."""
    return any(hasattr(data, kind) for kind in ("dataset", "loaders", "flattened"))


class _Check(Callback):
    """Measures before the first step, as the Trainer's only callback, and ends `fit`.

    Args:
        trainer: the Trainer, with its own callbacks still.
        strategy: what a micro-batch weighs.
        options: how loader batches are cut.
        most: the most rows.
    """

    def __init__(self, trainer: Any, strategy: Any, options: Any, most: int) -> None:
        self._callbacks = list(trainer.callbacks)
        self._accumulates = trainer.accumulate_grad_batches > 1
        self._strategies = {} if strategy is None else dict(named_strategies(strategy))
        self._options, self._most = options, most
        self._notes: tuple[str, ...] = ()
        self.report: Report | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        def first(batch: Any) -> Any:
            measure = lambda: self._measured(trainer, pl_module, batch)  # noqa: E731
            report, rank = of_all_ranks(trainer, measure)
            if (ranks := trainer.world_size) > 1:
                note = f"each of {ranks} ranks has measured its own rows; these are"
                notes = *report.notes, f"{note} rank {rank}'s"
                report = replace(report, notes=notes)
            self.report = report
            raise leaves_fit(trainer)

        vars(trainer.precision_plugin)["convert_input"] = first

    # ---- what is measured ------------------------------------------------------------

    @logged_from(logging.CRITICAL)  # once for all rehearsals
    def _measured(self, trainer: Any, module: Any, batch: Any) -> Report:
        subject = self._subject(trainer, module, batch)
        try:
            report = measured(subject, PRECISIONS)
            report = replace(report, notes=(*self._notes, *report.notes))
            return _beside_plain(report, subject)
        except Exception as error:
            is_known = isinstance(error, NotMeasured | TrainkitError)
            if is_known or str(trainer.precision) in FULL_PRECISIONS:
                raise
            return _undecided(subject, error)

    def _subject(self, trainer: Any, module: Any, batch: Any) -> Subject:
        options = cut_inside(trainer, module, self._callbacks, self._options)
        driver = AccumulationCallback(Uniform())
        if isinstance(module, AccumulationMixin):
            driver = object.__new__(MixinCallback)
        rehearsal = Rehearsal(trainer, module, driver, callbacks=self._callbacks)
        trims = False
        if options is not None and options.inside == "auto":
            paths = choose(trainer, module, driver, batch, self._callbacks)
            options = replace(options, inside=tuple(paths))
            self._notes = (f'found by inside="auto": {listed(paths)}',)
        elif options is not None and not is_inside(options):
            of = rehearsal, self._strategies, options, batch
            trims, why, _ = may_trim(*of) if self._strategies else (False, "", False)
            self._notes = (why,) if why else ()
        return subject_of(
            rehearsal,
            self._strategies,
            options,
            batch,
            trims=trims,
            has_batches=options is None or self._accumulates,
            most_rows=self._most,
        )


def _beside_plain(report: Report, subject: Subject) -> Report:
    """A report that also says how far plain Lightning would be off."""
    if not (subject.strategies and subject.is_plain and report.parts):
        return report
    subject = subject.varied(dtype=getattr(torch, report.precision))
    plain = replace(subject, strategies={}, options=None, has_batches=True)
    off = plain.window().off_from(subject.whole())
    note = f"plain accumulation: off by {off:.1e}"
    return replace(report, notes=(*report.notes, note))


def _undecided(subject: Subject, error: Exception) -> Report:
    """The report of a step that runs in the half precision of its Trainer alone."""
    precision = str(subject.trainer.precision)
    return replace(
        Report.of_nothing(""),
        num_rows=len(subject.all_rows),
        precision=precision,
        causes=(cause("precision", precision=precision, why=in_one_line(error)),),
    )
