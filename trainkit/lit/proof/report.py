"""The report of a check: verdict, places, causes, and what to do."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trainkit import __version__
from trainkit.lit.callback.table import Row
from trainkit.pages.atomic_file import write_atomically
from trainkit.pages.bars import Bar, Scale, bars
from trainkit.pages.frame import framed, summary_table

LABELS = {
    "denominator": "denominator",
    "rows": "rows see each other",
    "loss": "loss",
    "padding": "padding is seen",
    "state": "state",
    "randomness": "randomness",
    "host": "data on the host",
    "precision": "precision",
    "order": "order",
}
"""The kinds of causes, in words."""

MOST_SIZES = 12


@dataclass(frozen=True)
class Cause:
    """A reason why parts are not the whole, found by a variation of its own.

    Attributes:
        kind: "denominator", "rows" (which see each other), "loss" (is no mean over
            rows), "padding", "state", "randomness", "host" (a count of the whole
            batch), "precision" or "order" (of hooks).
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
        notes: what the check has left out, or could not see.
        gradients: all parameters that train, worst first.
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
        """Write the report as a page that needs no other file and no network.

        Args:
            path: the file; its folder must exist.
            command: what was run, if it was a command.
        """
        # A command may have bytes that are no text.
        text = page(self, command=command).encode("utf-8", "backslashreplace")
        write_atomically(Path(path), text.decode("utf-8"))


def _off(deviation: float) -> str:
    if math.isinf(deviation):
        return "the gradient of a part is not finite"
    return f"off by {deviation:.1e}"


# ---- the page ------------------------------------------------------------------------

MOST_LAYERS = 40
"""The most layers that a page shows."""


def page(report: Report, *, command: str = "") -> str:
    """The text of `check.html`.

    Args:
        report: of `trainkit.check`.
        command: what was run, if it was a command.
    """
    style = "other1" if report.exact else "validation"
    (_, verdict), *_ = report.rows()
    others = ", ".join(f"{name} {version(name)}" for name in ("torch", "lightning"))
    checked = [
        ("rows", f"{report.num_rows} of the training data"),
        ("arithmetic", report.precision),
        ("versions", f"trainkit {__version__}, {others}"),
    ]
    parts = [
        f'<p class="verdict {style}">{escape(verdict[0].upper() + verdict[1:])}.</p>',
        _section("Why", "", "".join(map(_cause, report.causes))),
        _section(
            "Cuts",
            "How far each cut is from the gradient of all rows as one batch.",
            _cuts(report),
        ),
        _section(
            "Deviation by layer",
            "How far each layer is off, as a share of the size of the whole gradient.",
            _layers(report),
        ),
        _section("Notes", "", "".join(f"<p>{escape(n)}</p>" for n in report.notes)),
        _section("What was checked", "", summary_table(checked)),
    ]
    return framed(
        f'<main class="check">{"".join(parts)}</main>',
        title="trainkit check",
        where=command or "trainkit.check(module, data)",
    )


def _section(title: str, says: str, body: str) -> str:
    if not body:
        return ""
    caption = f'<p class="says">{escape(says)}</p>' if says else ""
    return f"<section><h2>{escape(title)}</h2>{caption}{body}</section>"


def _cause(cause: Cause) -> str:
    place = f" at <code>{_name(cause.place)}</code>" if cause.place else ""
    kind = escape(LABELS.get(cause.kind, cause.kind))
    text = cause.text[:1].upper() + cause.text[1:].rstrip(".")
    lines = "".join(
        f'<li><code class="line">{escape(line)}</code></li>' for line in cause.remedy
    )
    return (
        f'<article class="validation"><h3>{kind}{place}</h3><p>{escape(text)}.</p>'
        f"<p>What to do:</p><ul>{lines}</ul></article>"
    )


def _cuts(report: Report) -> str:
    rows = [
        Bar(
            escape(c.name),
            c.deviation,
            (_number(c.deviation), c.sizes_text),
            note=c.note,
        )
        for c in report.cuts
    ]
    scale = Scale([c.deviation for c in report.cuts if c.deviation], report.rounding)
    heads = ("cut", "off by", "rows of each part")
    return bars(rows, scale, heads, threshold=_rounding(report), style="cuts")


def _layers(report: Report) -> str:
    layers = [each for each in _by_layer(report.gradients) if each.size or each.off]
    if not layers:
        return ""
    rows = [Bar(_name(x.name), x.off, (_number(x.off),)) for x in layers[:MOST_LAYERS]]
    scale = Scale([each.off for each in layers], report.rounding)
    body = bars(rows, scale, ("layer", "off by"), threshold=_rounding(report))
    rest = len(layers) - len(rows)
    return body + (f'<p class="note">{rest} more layers.</p>' if rest else "")


def _by_layer(gradients: Sequence[Gradient]) -> list[Gradient]:
    """The gradients of the parameters of each module together, worst first."""
    found: dict[str, list[Gradient]] = defaultdict(list)
    for each in gradients:
        found[each.name.rpartition(".")[0] or each.name].append(each)
    layers = [
        Gradient(
            name, math.hypot(*(p.size for p in of)), math.hypot(*(p.off for p in of))
        )
        for name, of in found.items()
    ]
    return sorted(layers, key=lambda each: -each.off)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def _rounding(report: Report) -> str:
    return f"rounding: up to {report.rounding:.0e}"


def _name(name: str) -> str:
    """A name as HTML that is broken behind its dots."""
    return escape(name).replace(".", ".<wbr>")
