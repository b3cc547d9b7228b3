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


@dataclass(frozen=True, repr=False)
class Report:
    """How far the gradient of a window is from that of one batch, and why.

    `str(report)` is a table.

    Attributes:
        exact: whether the deviation is rounding.
        deviation: as a share of the gradient's size.
        rounding: the largest deviation that counts as rounding.
        num_rows: how many rows were used.
        precision: in which arithmetic it was measured.
        parts: how many rows each part of the window had.
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
    parts: tuple[int, ...]
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
        first = self.causes[0]
        return first.with_place if first.hides else ""

    @property
    def verdict(self) -> str:
        """Whether it is exact, on how many rows, and how far off it is."""
        rows = f"on {self.num_rows} of your rows"
        if self.exact:
            return f"exact {rows}: off by {self.deviation:.0e} in {self.precision}"
        if not self.is_off:
            return f"not measured: {self._doubt}"
        off = f"is off by {self.deviation:.2g} of its size"
        if self.mixes_documents:
            return (
                f"documents that share a row are not what each is alone: the gradient "
                f"of {self.num_rows} of them {off}"
            )
        return (
            f"a window of this training is not the big batch: {rows}, its gradient "
            f"{off}"
        )

    @property
    def line(self) -> str:
        """The verdict in one line, as a run says it when it begins."""
        if self.exact and self.left_out:
            return f"{self.verdict}; left out: {', '.join(self.left_out)}"
        if not self.is_off:
            return self.verdict
        if not self.causes:
            return f"{self.verdict}. {MORE}"
        why = self.causes[0].with_place
        more = f"To do: {self.causes[0].remedy[0]}" if self.mixes_documents else MORE
        return f"{self.verdict}. {why[:1].upper()}{why[1:]}. {more}"

    def rows(self) -> list[Row]:
        """The report as rows of a table."""
        rows = [("verdict", self.verdict)]
        if self.parts:
            sizes = " + ".join(map(str, self.parts))
            most = f"rounding: up to {self.rounding:.0e}"
            rows.append(("parts", f"{sizes} rows, in {self.precision} ({most})"))
        for name, off in self.parameters[:5]:
            rows.append(("off", f"{name}: {off:.1e}"))
        for cause in self.causes:
            rows.append((LABELS.get(cause.kind, cause.kind), cause.with_place))
            rows += [("do", line) for line in cause.remedy]
        # Of a doubt, the verdict says why.
        notes = list(self.notes)
        if self.left_out:
            notes.append(f"left out: {', '.join(self.left_out)}")
        notes.append("holds for these rows and this moment of the training")
        return rows + [("note", note) for note in notes]

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
