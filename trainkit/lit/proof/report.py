"""What counts as exact, and the report: verdict, places, causes, and what to do."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal, get_args

import torch

from trainkit.errors import TrainkitError
from trainkit.lit.callback.table import Row
from trainkit.pages.atomic_file import write_atomically
from trainkit.pages.look import framed, table

Proof = Literal["warn", "require", "off"]

MOST_ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-5}
"""The largest deviation that is rounding. Exact modules were off by at most 3e-7 in
float32 and 1e-13 in float64; a balance term of experts by 9e-5."""

ALARM = {torch.float64: 1e-8, torch.float32: 1e-4}
"""What is certainly more than rounding."""

SURELY_ROUNDING = 5e-6
"""In float32, what is above this is measured again in float64."""


class NotMeasured(Exception):  # nothing is wrong
    """A rehearsal was not possible; the text says why."""


def checked_proof(proof: Any) -> Proof:
    """The option; YAML reads a bare `off` as false."""
    if proof in (False, "False"):
        return "off"
    if proof not in get_args(Proof):
        raise TrainkitError(
            f'proof: must be "warn", "require" or "off", received {proof!r}.'
        )
    return proof


def in_one_line(error: BaseException) -> str:
    """The first sentence of an error, in whole words."""
    first = str(error).strip().split("\n")[0].split(". ")[0].rstrip(".")
    said = shorten(first, 200, placeholder=" ...")
    if isinstance(error, NotMeasured | TrainkitError):
        return said
    return f"{type(error).__name__}: {said}"


LABELS = {
    "rows": "rows see each other",
    "padding": "padding is seen",
    "documents": "documents mix",
}
"""Kinds of causes that need more words."""

MORE = "trainkit.check(module, data) names the remedy."


@dataclass(frozen=True)
class Cause:
    """A reason why parts are not the whole, found by a variation of its own.

    Attributes:
        kind: "denominator", "rows" (which see each other), "loss" (is no mean over
            rows), "padding", "documents" (of one row, which mix), "state",
            "randomness", "host" (a count of the whole batch), "precision" or "order"
            (of hooks).
        place: the path of the module, parameter or field, or the line; "training_step"
            for the loss; "" where there is none.
        text: what was found.
        remedy: what to do, as lines that can be pasted where there are such.
    """

    kind: str
    place: str
    text: str
    remedy: tuple[str, ...] = ()

    @property
    def hides(self) -> bool:
        """Whether nobody can say what else differs before it is gone."""
        return self.kind in ("randomness", "precision")

    @property
    def with_place(self) -> str:
        """The text, and where."""
        return f"{self.text} ({self.place})" if self.place else self.text


@dataclass(frozen=True)
class Cut:
    """A way to cut the rows, and how far its parts are from the whole.

    Attributes:
        name: what was cut, and how it was weighed.
        sizes: the rows of each part.
        deviation: as a share of the gradient's size; None where a part could not run.
    """

    name: str
    sizes: tuple[int, ...]
    deviation: float | None


@dataclass(frozen=True, repr=False)
class Report:
    """How far the gradient of a window is from that of one batch, and why.

    `str(report)` is a table.

    Attributes:
        exact: whether the deviation is rounding, for every cut of the run.
        deviation: the largest of the cuts with the run's strategy, as a share of the
            gradient's size.
        rounding: the largest deviation that counts as rounding.
        num_rows: how many rows were used.
        precision: in which arithmetic it was measured.
        cuts: all cuts that were measured.
        parameters: the parameters that are off, worst first, each with its deviation.
        causes: why, where it is not exact; and what holds in expectation only.
        notes: what else is to be known.
        left_out: what the rehearsal has not done as the run does it.
        doubt: why nobody can say whether it is exact; "" otherwise.
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
    left_out: tuple[str, ...] = ()
    doubt: str = ""

    @classmethod
    def of_nothing(cls, doubt: str) -> Report:
        """The report where nothing could be measured."""
        return cls(False, math.nan, 0.0, 0, "float32", (), doubt=doubt)

    @property
    def is_off(self) -> bool:
        """Whether the window is not the big batch, and that is certain."""
        return not self.exact and not self._doubt

    @property
    def mixes_documents(self) -> bool:
        """Whether documents of one row see each other, however rows are cut."""
        return any(cause.kind == "documents" for cause in self.causes[:1])

    @property
    def _doubt(self) -> str:
        if self.doubt or self.exact or not self.causes:
            return self.doubt
        hides = all(cause.hides for cause in self.causes)
        return self.causes[0].with_place if hides else ""

    @property
    def line(self) -> str:
        """The verdict in one line, as a run says it when it begins."""
        rows = f"on {self.num_rows} of your rows"
        if self.exact:
            left_out = ", ".join(self.left_out)
            more = f"; left out: {left_out}" if left_out else ""
            off = f"off by {self.deviation:.0e} in {self.precision}"
            return f"exact {rows}: {off}{more}"
        if not self.is_off:
            return f"not measured: {self._doubt}"
        first = next((each for each in self.causes if not each.hides), None)
        cause = "" if first is None else first.with_place
        cause = f"{cause[:1].upper()}{cause[1:]}. " if cause else ""
        if first is not None and self.mixes_documents:
            return (
                f"documents that share a row are not what each is alone: the gradient "
                f"of {self.num_rows} of them is off by {self.deviation:.2g} of its "
                f"size. {cause}To do: {first.remedy[0]}"
            )
        return (
            f"a window of this training is not the big batch: {rows}, its gradient is "
            f"off by {self.deviation:.2g} of its size. {cause}{MORE}"
        )

    def rows(self) -> list[Row]:
        """The report as rows of a table."""
        rows = [("verdict", self._verdict())]
        for cut in self.cuts:
            off = "it could not run" if cut.deviation is None else _off(cut.deviation)
            rows.append((cut.name, f"{off} ({' + '.join(map(str, cut.sizes))} rows)"))
        for name, off in self.parameters[:5]:
            rows.append(("off", f"{name}: {off:.1e}"))
        for cause in self.causes:
            rows.append((LABELS.get(cause.kind, cause.kind), cause.with_place))
            rows += [("do", line) for line in cause.remedy]
        notes = [*filter(None, [self.doubt]), *self.notes]
        if self.left_out:
            notes.append(f"left out: {', '.join(self.left_out)}")
        notes.append("holds for these rows and this moment of the training")
        return rows + [("note", note) for note in notes]

    def _verdict(self) -> str:
        measured = (
            f"{_off(self.deviation)} (rounding: up to {self.rounding:.0e}, "
            f"{self.precision})"
        )
        if self.exact:
            return f"exact on {self.num_rows} rows: {measured}"
        if not self.is_off:
            return f"cannot say on {self.num_rows} rows: {measured}"
        if self.mixes_documents:
            return f"documents mix, {self.num_rows} of one row: {measured}"
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

    def to_html(self, path: str | Path, *, command: str = "") -> None:
        """Write the table as a page that needs no other file and no network.

        Args:
            path: the file; its folder must exist.
            command: what was run, if it was a command.
        """
        text = framed(
            table(self.rows()),
            title="trainkit check",
            where=command or "trainkit.check(module, data)",
        )
        # A command may have bytes that are no text.
        text = text.encode("utf-8", "backslashreplace").decode("utf-8")
        write_atomically(Path(path), text)


def _off(deviation: float) -> str:
    if math.isinf(deviation):
        return "the gradient of a part is not finite"
    return f"off by {deviation:.1e}"
