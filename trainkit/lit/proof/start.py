"""The proof at the start of a run: rehearsed on a few rows of its data."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch

from trainkit.core.terms import leading
from trainkit.errors import TrainkitError
from trainkit.lit.batch_size.effective import may_have_batches, micro_batch_of
from trainkit.lit.callback.base import WindowOwner
from trainkit.lit.callback.table import say
from trainkit.lit.proof.measure import measured
from trainkit.lit.proof.parts import chosen_parts
from trainkit.lit.proof.rehearse import Rehearsals
from trainkit.lit.proof.report import Cause, Report
from trainkit.lit.proof.rows import few_rows, has_equal_batches
from trainkit.lit.proof.subject import Subject, has_parts, largest, refuse_backend
from trainkit.lit.proof.verdict import NotMeasured, in_one_line

SIZES = ((3, 2, 2), (3, 2), (2, 2), (2, 1), (1, 1))
"""Rows in the parts, where batches of the run may be unlike."""

EQUAL_SIZES = ((2, 2, 2), (2, 2), (1, 1, 1), (1, 1))

PRECISIONS = torch.float32, torch.float64

ELSEWHERE = Cause("rank", "", "it was found on another rank")


class ProofAtStart:
    """Measures once, and says what was found.

    Args:
        trainer: in `fit`.
        module: what it trains.
        windows: the callback that divides windows.
    """

    label = "proof"
    is_on = True

    def __init__(self, trainer: Any, module: Any, windows: WindowOwner) -> None:
        self._trainer, self._module, self._windows = trainer, module, windows

    def run(self, batch: Any) -> None:
        """Measure, when the first batch is there, as the loader has yielded it."""
        windows = self._windows
        has_several = has_parts(self._trainer, self._module, windows)
        has_several &= not self._is_one_micro_batch(batch)
        is_asked = self.is_on and windows.proof != "off"
        if not is_asked or not (windows.inside is not None or has_several):
            return
        try:
            report = measured(self._subject(batch), PRECISIONS)
        except Exception as error:
            report = Report.of_nothing(in_one_line(error))
        self.tell(report)

    def _is_one_micro_batch(self, batch: Any) -> bool:
        """Whether windows are split in name only: each loader batch fits whole."""
        windows, trainer = self._windows, self._trainer
        if not windows.is_split or trainer.world_size > 1 or may_have_batches(trainer):
            return False
        has_size = micro_batch_of(trainer.train_dataloader) is not None
        return has_size and windows.split.is_one_micro_batch(batch)

    def _subject(self, batch: Any) -> Subject:
        trainer, module, windows = self._trainer, self._module, self._windows
        refuse_backend(trainer)
        options, loader = windows.cut, trainer.train_dataloader
        if windows.inside is not None:
            options = replace(options, inside=tuple(windows.inside.paths))
        elif windows.is_split and not windows.split.trims:
            options = replace(options, trim=False)
        is_split, own = windows.is_split, leading(windows.strategies)
        has_batches = has_parts(trainer, module, windows)
        if is_split:
            has_batches = may_have_batches(trainer)
        # Loader batches have widths of their own, also where none is trimmed.
        cuts = windows.cut if has_batches else options
        rows = few_rows(loader, batch, cuts if is_split else None, own)
        usual = EQUAL_SIZES if has_equal_batches(loader) and not is_split else SIZES
        sizes = next((each for each in usual if sum(each) <= rows.num_rows), None)
        if sizes is None:
            raise NotMeasured(f"there is {rows.num_rows} row, which cannot be cut")
        return Subject(
            trainer,
            module,
            windows.strategies if windows.has_strategy else {},
            options,
            Rehearsals(trainer, module, windows),
            rows,
            chosen_parts(rows, sizes, own, is_split=is_split),
            has_batches=has_batches,
        )

    def tell(self, report: Report) -> None:
        """Say what was found, on all ranks alike.

        Raises:
            TrainkitError: the run requires it to be exact, and it is not.
        """
        trainer = self._trainer
        badness = 2 * report.is_off or int(not report.exact)
        worst = largest(trainer, float(badness))
        off = largest(trainer, report.deviation if badness == 2 else -1.0)
        line = report.line
        if badness < worst:
            line = Report.of_nothing("another rank cannot measure").line
            if worst == 2:
                there = replace(report, exact=False, doubt="", deviation=off)
                line = replace(there, causes=(ELSEWHERE,)).line
        if worst and self._windows.proof == "require":
            raise TrainkitError(
                f'proof="require": {line.rstrip(".")}. trainkit.check(module, data) '
                f'says more; proof="warn" trains all the same.'
            )
        if not trainer.is_global_zero:
            return
        say(trainer, (self.label, line))
        if worst == 2 or (report.doubt and report.parameters):
            warnings.warn(f"{self.label}: {line}", stacklevel=2)
