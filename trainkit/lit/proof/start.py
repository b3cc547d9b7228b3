"""The proof at the start of a run: rehearsed on its first batches, then said."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from trainkit.core.documents import documents_option, find_documents
from trainkit.core.split.cutting import Cutter, Limit
from trainkit.core.terms import telling_lengths
from trainkit.errors import TrainkitError
from trainkit.lit._compat import replaced
from trainkit.lit.aside import logged_from
from trainkit.lit.batch_norm.guard import BatchNormGuard
from trainkit.lit.batch_size import (
    may_be_several,
    may_have_batches,
    micro_batch_of,
)
from trainkit.lit.callback.base import (
    WindowOwner,
    is_rehearsal,
)
from trainkit.lit.callback.table import say
from trainkit.lit.proof.documents import of_documents
from trainkit.lit.proof.ending import may_trim
from trainkit.lit.proof.measure import measured, of_all_ranks
from trainkit.lit.proof.rehearse import Rehearsal
from trainkit.lit.proof.report import MORE, NotMeasured, Report, in_one_line
from trainkit.lit.proof.subject import Subject, subject_of

MOST_ROWS = 7
PRECISIONS = torch.float32, torch.float64

UNCUT = "the first batch is one micro-batch; where one is cut, "


@contextlib.contextmanager
def first_batches(trainer: Any, pl_module: Any, windows: Any) -> Iterator[None]:
    """Rehearse on the first batch that training gets, before any hook of a step sees
    it.

    Args:
        trainer: about to train.
        pl_module: what it trains.
        windows: the callback that divides windows.
    """
    if is_rehearsal(trainer):
        yield
        return
    plugin, tap = trainer.precision_plugin, contextlib.ExitStack()
    convert, proof = plugin.convert_input, ProofAtStart(trainer, pl_module, windows)

    def look(batch: Any) -> Any:
        # Finders take all callbacks out while they search, within a training too.
        if trainer.training and windows in trainer.callbacks:
            tap.close()
            proof.look(batch)
        return convert(batch)

    with tap:
        tap.enter_context(replaced(plugin, convert_input=look))
        yield


class ProofAtStart:
    """Measures once, and says what was found.

    Args:
        trainer: in `fit`.
        module: what it trains.
        windows: the callback that divides windows.
    """

    def __init__(self, trainer: Any, module: Any, windows: WindowOwner) -> None:
        self._trainer, self._module, self._windows = trainer, module, windows

    @logged_from(logging.CRITICAL)  # once for all rehearsals
    def look(self, batch: Any) -> None:
        """Find what is to be found by rehearsals, and prove the rest."""
        windows, split = self._windows, self._windows.split
        if windows.inside is not None:
            windows.inside.find(self._trainer, windows, batch)
        if split is not None:
            split.trims = self._may_trim(batch)
        self.run(batch)

    def run(self, batch: Any) -> None:
        """Measure, if that is asked for, and say what was found."""
        windows, number = self._windows, 0
        how = documents_option(windows.cut, *windows.strategies.values())
        documents = find_documents(batch, how)
        if documents is not None:
            number = len(documents.spans) - len(documents.numbers)
        if number > 0:
            say(self._trainer, ("documents", str(documents)))
        if windows.proof == "off":
            return
        is_asked = self._is_asked(batch)
        if not (is_asked or number):
            return
        measure = measured if is_asked else of_documents
        try:
            report = measure(self._subject(batch), PRECISIONS)
        except Exception as error:
            report = Report.of_nothing(in_one_line(error))
        if report is None:
            return
        if report.is_off and not (report.mixes_documents or self._is_cut(batch)):
            report = replace(report, doubt=f"{UNCUT}{report.line}")
        self.tell(report)

    def _is_asked(self, batch: Any) -> bool:
        """Whether a step has several micro-batches."""
        windows, trainer = self._windows, self._trainer
        if windows.inside is not None or not self._has_parts:
            return windows.inside is not None
        if self._is_cut(batch) or windows.cut.tokens is not None:
            return True
        return micro_batch_of(trainer.train_dataloader) is None  # others may be larger

    def _is_cut(self, batch: Any) -> bool:
        """Whether the run cuts this batch, or brings several together."""
        windows, trainer = self._windows, self._trainer
        if not windows.is_split or trainer.world_size > 1 or may_have_batches(trainer):
            return True
        options = windows.cut
        cutter = Cutter(options, telling_lengths(windows.strategies))  # has no memory
        cutter.trim = windows.split.trims
        limit, few = Limit(options.size, options.tokens), options.shapes is not None
        with contextlib.suppress(TrainkitError):  # a hook may add what is missing
            parts = cutter.parts(batch, cutter.read(batch).rows, limit, few)
            return options.is_auto or len(parts) > 1
        return True

    @property
    def _has_parts(self) -> bool:
        """Whether a window has several loader batches, or parts of one."""
        of = self._trainer, self._module, self._windows
        return self._trainer.world_size > 1 or may_be_several(*of)

    def _subject(self, batch: Any) -> Subject:
        trainer, windows = self._trainer, self._windows
        options, split = windows.cut, windows.split
        has_batches = may_have_batches(trainer) if split else self._has_parts
        has_batches &= windows.has_strategy  # each rank's batch is a window without one
        if has_batches and windows.shares_statistics:
            raise NotMeasured("BatchNorm sees all ranks, and a copy runs on one")
        if windows.inside is not None:
            options = replace(options, inside=tuple(windows.inside.paths))
        return subject_of(
            Rehearsal(trainer, self._module, windows),
            windows.strategies if windows.has_strategy else {},
            options,
            batch,
            trims=split is not None and split.trims,
            has_batches=has_batches,
            most_rows=MOST_ROWS,
        )

    def tell(self, own: Report) -> None:
        """Say what was found, on all ranks alike.

        Raises:
            TrainkitError: the run requires it to be exact, and it is not.
        """
        trainer = self._trainer
        report, rank = of_all_ranks(trainer, lambda: own)
        line = report.line
        if rank and not report.exact:
            line = f"on rank {rank}, {line}"
        if not report.exact and self._windows.proof == "require":
            more = "" if MORE in line else "trainkit.check(module, data) says more; "
            raise TrainkitError(
                f'proof="require": {line.rstrip(".")}. {more}proof="warn" trains all '
                f"the same."
            )
        if not trainer.is_global_zero:
            return
        say(trainer, ("proof", line))
        if report.is_off or (report.doubt and report.parameters):
            warnings.warn(f"proof: {line}", stacklevel=2)

    def _may_trim(self, batch: Any) -> bool:
        """Whether rows compute the same without columns that are only padding."""
        trainer, windows = self._trainer, self._windows
        guards = [c for c in trainer.callbacks if isinstance(c, BatchNormGuard)]
        rehearsal = Rehearsal(trainer, self._module, windows, callbacks=guards)
        of = rehearsal, windows.strategies, windows.cut, batch
        trims, text, is_seen = may_trim(*of)
        if is_seen:
            warnings.warn(f"MicroBatching: {text}", stacklevel=2)
        elif text:
            say(trainer, ("trimming", text))
        return trims
