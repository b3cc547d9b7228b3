"""What is rehearsed on a run's first batches, before any hook of a step sees them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

from trainkit.core.terms import leading
from trainkit.lit._compat import replaced
from trainkit.lit.batch_norm.guard import BatchNormGuard
from trainkit.lit.callback.base import fetches_batches, is_rehearsal, is_taken_out
from trainkit.lit.callback.table import say
from trainkit.lit.proof.rehearse import Rehearsals
from trainkit.lit.proof.report import Report
from trainkit.lit.proof.rows import FewRows
from trainkit.lit.proof.start import ProofAtStart
from trainkit.lit.proof.subject import Subject, refuse_backend
from trainkit.lit.proof.verdict import in_one_line


@contextlib.contextmanager
def first_batches(trainer: Any, pl_module: Any, windows: Any) -> Iterator[None]:
    """Rehearse on the first batch that training gets, and where rows are trimmed, on
    the first one with padding.

    Args:
        trainer: about to train.
        pl_module: what it trains.
        windows: the callback that divides windows.
    """
    if is_rehearsal(trainer):
        yield
        return
    plugin, tap = trainer.precision_plugin, contextlib.ExitStack()
    convert = plugin.convert_input
    first = FirstBatches(trainer, pl_module, windows)

    def look(batch: Any) -> Any:
        if trainer.training and not is_taken_out(windows, trainer):
            if first.look(batch):
                tap.close()
        return convert(batch)

    with tap:
        if fetches_batches(pl_module):
            text = "training_step takes its batches from dataloader_iter itself"
            first.proof.tell(Report.of_nothing(text))
        else:
            tap.enter_context(replaced(plugin, convert_input=look))
        yield


class FirstBatches:
    """Looks at batches until nothing is left to be rehearsed.

    Args:
        trainer: in `fit`.
        module: what it trains.
        windows: the callback that divides windows.
    """

    def __init__(self, trainer: Any, module: Any, windows: Any) -> None:
        self._trainer, self._module, self._windows = trainer, module, windows
        self.proof = ProofAtStart(trainer, module, windows)
        self._is_proven = False

    def look(self, batch: Any) -> bool:
        """Rehearse what is to be rehearsed; returns whether nothing is left."""
        windows = self._windows
        split: Any = windows.split
        if windows.inside is not None:
            windows.inside.find(self._trainer, windows, batch)
        if split is not None and split.trims is None:
            has_padding = split.has_padding(batch)
            if has_padding is not False:
                split.trims = self.may_trim(batch) if has_padding else False
        if not self._is_proven:
            self._is_proven = True
            self.proof.run(batch)
        return split is None or split.trims is not None

    # ---- trimming --------------------------------------------------------------------

    def _rows(self, batch: Any) -> FewRows:
        windows = self._windows
        return FewRows(batch, windows.cut, leading(windows.strategies))

    def _subject(self, rows: FewRows) -> Subject:
        windows = self._windows
        own = [
            each for each in self._trainer.callbacks if isinstance(each, BatchNormGuard)
        ]
        of = self._trainer, self._module, windows
        rehearsals = Rehearsals(*of, callbacks=own)  # guards change padding's part
        how = windows.strategies, windows.cut, rehearsals, rows
        return Subject(*of[:2], *how, [], has_batches=False)

    def may_trim(self, batch: Any) -> bool | None:
        """Whether rows compute the same without columns that are only padding; None if
        another batch must show it.

        Where labels alone tell lengths, a row may continue behind its last one. So they
        are made to end earlier.
        """
        try:
            refuse_backend(self._trainer)
            rows = self._rows(batch)
            by_labels = rows.have_labels_alone
            if by_labels and (rows := rows.with_labels_cut()) is None:
                return None
            off = self._subject(rows).off_without_padding()
            if not off:
                return True
            sees, remedy = "its padding", "mask padding in the model"
            if by_labels:
                sees = "what stands behind a row's last label"
                remedy = (
                    "name the mask, lengths='path.to.mask', or the labels if each row "
                    "ends with its last one"
                )
            text = (
                f"the model sees {sees}: without it, the gradient of some rows is off "
                f"by {off:.2g} of its size. Micro-batches keep the loader batch's "
                f"width; to compute less, {remedy}"
            )
            warnings.warn(f"MicroBatching: {text}.", stacklevel=2)
        except Exception as error:
            text = (
                f"micro-batches keep the loader batch's width, since it could not be "
                f"measured whether the model sees its padding: {in_one_line(error)}"
            )
            if self._trainer.is_global_zero:
                say(self._trainer, ("trimming", text))
        return False
