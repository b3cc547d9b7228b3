"""The proof of the inner cut: are chunks of rows the rows at once?"""

from __future__ import annotations

from typing import Any

from trainkit.core.proof.gradients import share_of
from trainkit.lit.measure.at_start import MOST_OF_FIT, ProofAtStart
from trainkit.lit.measure.clean import NotMeasured
from trainkit.lit.measure.first_rows import FirstRows, InParts
from trainkit.lit.measure.passes import Passes
from trainkit.lit.measure.terms import Pass

CHUNK = 2
"""The most rows in a chunk of the few that are measured."""


class ProofInside(ProofAtStart):
    """Compares a pass whose submodules run in chunks with one in which they do not.

    Args:
        *of: as of `ProofAtStart`.
        cuts: the submodules.
        **options: as of `ProofAtStart`.
    """

    label = "proof inside"

    def __init__(self, *of: Any, cuts: Any, **options: Any) -> None:
        super().__init__(*of, **options)
        self._cuts = cuts

    def _rows_in_step(self, rows: FirstRows) -> int:
        return rows.num_rows

    def _run(self, passes: Passes, cut: InParts) -> tuple[Pass, list[Pass]]:
        rows = sorted(sum(cut.rows, []))
        with self._cuts.whole():
            whole = passes.run(cut.whole, rows)
        chunk = min(CHUNK, len(rows) - 1)
        with self._cuts.measured(chunk, passes.around_chunk, passes.turning):
            found = passes.run(cut.whole, rows)
        if not passes.num_chunks:
            raise NotMeasured(
                f"{self._cuts.names}: on {len(rows)} rows training_step does not call "
                f"it, or calls it with too few rows to cut"
            )
        return whole, [found]

    def _off_by(
        self, whole: Pass, parts: list[Pass], cut: InParts
    ) -> tuple[float, float]:
        loss, found = (sum(t.loss for t in each.terms) for each in (whole, parts[0]))
        off = share_of(parts[0].gradient - whole.gradient, whole.gradient)
        return off, abs(found - loss) / (abs(loss) or 1.0)

    def _rounding(self, passes: Passes, cut: InParts, parts: list[Pass]) -> None:
        return None  # the order of rows is a matter of the loss

    def _cause(
        self, whole: Pass, parts: list[Pass], most_of_fit: float = MOST_OF_FIT
    ) -> str:
        return f"{self._cuts.names}: chunks of rows do not give what all rows give."
