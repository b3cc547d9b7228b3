"""What is rehearsed on a run's first batches, before any hook of a step sees them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from trainkit.core.terms import leading
from trainkit.lit._compat import replaced
from trainkit.lit.batch_norm.guard import BatchNormGuard
from trainkit.lit.callback.base import fetches_batches, is_rehearsal, is_taken_out
from trainkit.lit.callback.table import say
from trainkit.lit.proof.choose import choose
from trainkit.lit.proof.rehearse import Plan, Rehearsals
from trainkit.lit.proof.rows import FewRows
from trainkit.lit.proof.start import ProofAtStart
from trainkit.lit.proof.subject import Subject, refuse_backend, refuse_draws
from trainkit.lit.proof.verdict import NotMeasured, Verdict, in_one_line

ROWS = 4
"""How many rows are run with their padding and without it."""


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
            first.proof.tell(Verdict(None, cause=text))
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
        if windows.inside is not None and not windows.inside.cuts:
            windows.inside.find(choose(self._trainer, self._module, windows, batch))
        if split is not None and split.trims is None and self._has_padding(batch):
            split.trims = self.may_trim(batch)
        if not self._is_proven:
            self._is_proven = True
            self.proof.run(batch)
        return split is None or split.trims is not None

    @property
    def _guards(self) -> list[Any]:
        """The callbacks that change layers, and so padding's part."""
        own = self._trainer.callbacks
        return [each for each in own if isinstance(each, BatchNormGuard)]

    # ---- trimming --------------------------------------------------------------------

    def _rows(self, batch: Any) -> FewRows:
        windows = self._windows
        return FewRows(batch, windows.micro_batching, leading(windows.strategies))

    def _has_padding(self, batch: Any) -> bool:
        try:
            return self._rows(batch).has_padding
        except NotMeasured:
            return False

    def may_trim(self, batch: Any) -> bool:
        """Whether rows compute the same without columns that are only padding."""
        try:
            refuse_backend(self._trainer)
            off = self._off_without_padding(self._rows(batch))
            if not off:
                return True
            text = (
                f"the model sees its padding: without it, the gradient of some rows is "
                f"off by {off:.2g} of its size. Micro-batches keep the loader batch's "
                f"width; to compute less, mask padding in the model"
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

    def _off_without_padding(self, rows: FewRows) -> float:
        """How far gradients are off without padding; 0 if not at all."""
        lengths, of = rows.lengths(), (self._trainer, self._module, self._windows)
        few = [row for row in rows.shortest(ROWS) if lengths[row] < max(lengths)]
        wide = Subject(
            self._trainer,
            self._module,
            self._windows.strategies,
            None,
            Rehearsals(*of, callbacks=self._guards),
            rows,
            [few],
            has_batches=True,
            base=Plan(fixes_draws=True),
            are_alike=True,
        )
        trimmed, whole = replace(wide, are_alike=False).whole(few), wide.whole(few)
        off = trimmed.off_from(whole)
        if off <= wide.most_rounding:
            return 0.0
        refuse_draws(wide, whole, trimmed)
        return off
