"""The result of a check: verdict, places, causes, and what to do."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from trainkit.lit.callback.table import Row

LABELS = {
    "denominator": "denominator",
    "rows": "rows see each other",
    "loss": "loss",
    "padding": "padding is seen",
    "state": "state",
    "turns": "taking turns",
    "randomness": "randomness",
    "host": "data on the host",
    "precision": "precision",
    "order": "order",
}
"""The kinds of causes, in words."""

MOST_SIZES = 12


@dataclass(frozen=True)
class Cause:
    """A reason why parts are not the whole, found by an experiment of its own.

    Attributes:
        kind: "denominator", "rows" (which see each other), "loss" (is no mean over
            rows), "padding", "state", "turns" (which micro-batches take), "randomness",
            "host" (a count of the whole batch), "precision" or "order" (of hooks).
        place: the path of the module, parameter or field, or the line; "training_step"
            for the loss; "" where there is none.
        text: what was found.
        remedy: what to do, as lines that can be pasted where there are such.
        hides: whether nobody can say what else differs before it is gone.
    """

    kind: str
    place: str
    text: str
    remedy: tuple[str, ...] = ()
    hides: bool = False


@dataclass(frozen=True)
class Cut:
    """A way to cut the rows, and how far its parts are from the whole.

    Attributes:
        name: what was cut, and how it was weighed.
        sizes: the rows of each part.
        deviation: as a share of the gradient's size; None where a part could not run.
        note: why it could not, or what the deviation is.
    """

    name: str
    sizes: tuple[int, ...]
    deviation: float | None
    note: str = ""

    @property
    def sizes_text(self) -> str:
        """The rows of each part, in words."""
        sizes = self.sizes
        if len(sizes) > 3 and len(set(sizes)) == 1:
            return f"{len(sizes)} x {sizes[0]}"
        more = " + ..." if len(sizes) > MOST_SIZES else ""
        return " + ".join(map(str, sizes[:MOST_SIZES])) + more


@dataclass(frozen=True)
class Gradient:
    """The gradient of one parameter: its size, and how far a window is from it.

    Both are shares of the size of the whole gradient, so that parameters can be
    compared with each other and with what counts as rounding.

    Attributes:
        name: of the parameter.
        size: of its gradient for all rows as one batch.
        off: how far the gradient of the window is from it.
    """

    name: str
    size: float
    off: float


@dataclass(frozen=True, repr=False)
class Findings:
    """How far the gradient of a window is from that of one batch, and why.

    Attributes:
        exact: whether the deviation is rounding, for every cut that was measured.
        deviation: the largest of the cuts with the run's strategy, as a share of the
            gradient's size.
        rounding: the largest deviation that counts as rounding.
        num_rows: how many rows were used.
        precision: in which arithmetic it was measured.
        cuts: all cuts that were measured.
        parameters: the parameters that are off, worst first, each with its deviation.
        causes: why, where it is not exact; and what holds in expectation only.
        notes: what the check could not see.
        gradients: all parameters that train, for the cut of `deviation`, worst first.
    """

    exact: bool
    deviation: float
    rounding: float
    num_rows: int
    precision: str
    cuts: tuple[Cut, ...]
    parameters: tuple[tuple[str, float], ...] = ()
    causes: tuple[Cause, ...] = ()
    notes: tuple[str, ...] = ()
    gradients: tuple[Gradient, ...] = ()

    def rows(self) -> list[Row]:
        """The report as rows of a table."""
        rows = [("verdict", self._verdict())]
        for cut in self.cuts:
            off = "" if cut.deviation is None else _off(cut.deviation)
            text = ", ".join(filter(None, [off, cut.note]))
            rows.append((cut.name, f"{text} ({cut.sizes_text} rows)"))
        for name, off in self.parameters[:5]:
            rows.append(("off", f"{name}: {off:.1e}"))
        for cause in self.causes:
            place = f" ({cause.place})" if cause.place else ""
            rows.append((LABELS.get(cause.kind, cause.kind), cause.text + place))
            rows += [("do", line) for line in cause.remedy]
        rows += [("note", note) for note in self.notes]
        return rows

    def _verdict(self) -> str:
        measured = (
            f"{_off(self.deviation)} (rounding: up to {self.rounding:.0e}, "
            f"{self.precision})"
        )
        if self.exact:
            return f"exact on {self.num_rows} rows: {measured}"
        if self.causes and all(cause.hides for cause in self.causes):
            return f"cannot say on {self.num_rows} rows: {measured}"
        if self.deviation <= self.rounding:
            kinds = {cause.kind for cause in self.causes}
            if "state" not in kinds:
                return f"not the big batch, as other ranks have measured: {measured}"
            return f"not the big batch: state moves. Gradients alone are {measured}"
        return f"not the big batch on {self.num_rows} rows: {measured}"

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:<{width}}  {text}" for label, text in rows)

    __repr__ = __str__  # what a notebook shows

    def assert_exact(self) -> None:
        """Raise an AssertionError with the whole report unless it is exact."""
        if not self.exact:
            raise AssertionError(f"trainkit check:\n{self}")

    def as_dict(self) -> dict[str, Any]:
        """The report as plain numbers, texts and lists."""
        return json.loads(json.dumps(asdict(self)))


def _off(deviation: float) -> str:
    if math.isinf(deviation):
        return "the gradient of a part is not finite"
    return f"off by {deviation:.1e}"
