"""`check.html`: what a check has found, as a page."""

from __future__ import annotations

import ast
import math
from collections import defaultdict
from collections.abc import Sequence
from html import escape
from importlib.metadata import version
from pathlib import Path

from trainkit import __version__
from trainkit.lit.proof.findings import LABELS, Cause, Cut, Findings, Gradient
from trainkit.pages.atomic_file import write_atomically
from trainkit.pages.bars import Bar, Scale, bars
from trainkit.pages.frame import framed, summary_table

_MOST = 40
"""The most layers that are shown at once."""

_FOUND_BY = {
    "denominator": "The weights with which the parts add up to the whole were compared "
    "with what the batch counts, or gradients of unions of parts with two means.",
    "rows": "Each module's outputs for a part were compared with its outputs for the "
    "same rows among all rows.",
    "loss": "Each module's outputs for a part are its outputs for the same rows among "
    "all rows, and the loss still differs.",
    "randomness": "All rows went through training_step twice, and the parts once more "
    "without the draws across rows.",
    "padding": "Parts that are padded as the whole are exact, trimmed ones are not.",
    "state": "A part ran after another one, and after none.",
    "turns": "Parts ran beside the other rows, sharing BatchNorm's statistics, and by "
    "themselves without BatchNorm.",
    "host": "The parts add up as a sum does, and the batch holds a number that is not "
    "cut.",
    "order": "Each hook ran on the gradients of two parts, and once on their sum.",
    "precision": "training_step ran in float64 and in float32, and failed.",
}
"""The experiment by which a kind of cause is found."""


def write_page(report: Findings, path: str | Path, *, command: str = "") -> None:
    """Write a report as a page, whole or not at all.

        trainkit.check(module, data).to_html("check.html")

    The page needs no other file and no network.

    Args:
        report: of `trainkit.check`.
        path: the file; its folder must exist.
        command: what was run, if it was a command.
    """
    # A command may have bytes that are no text.
    text = page(report, command=command).encode("utf-8", "backslashreplace")
    write_atomically(Path(path), text.decode("utf-8"))


def page(report: Findings, *, command: str = "") -> str:
    """The text of `check.html`."""
    style = "other1" if report.exact else "validation"
    (_, verdict), *_ = report.rows()
    layers = _by_layer(report.gradients)
    parts = [
        f'<p class="verdict {style}">{escape(verdict[0].upper() + verdict[1:])}.</p>',
        _causes(report),
        _section("Cuts", _says_of(report.cuts), _cuts(report)),
        _layers(report, layers),
        _notes(report.notes),
        _section("What was checked", "", summary_table(_checked(report))),
        _numbers(report.gradients),
    ]
    return framed(
        f'<main class="check">{"".join(parts)}</main>',
        title="trainkit check",
        where=command or "trainkit.check(module, data)",
    )


def _section(title: str, says: str, body: str) -> str:
    caption = f'<p class="says">{escape(says)}</p>' if says else ""
    return f"<section><h2>{escape(title)}</h2>{caption}{body}</section>"


# ---- causes --------------------------------------------------------------------------


def _causes(report: Findings) -> str:
    if report.causes:
        numbered = enumerate(report.causes, 1)
        return _section("Why", "", "".join(_cause(each, n) for n, each in numbered))
    if report.exact:
        return ""
    return _section("Why", "", "<p>No experiment has found a cause.</p>")


def _cause(cause: Cause, number: int) -> str:
    place = f" at <code>{_name(cause.place)}</code>" if cause.place else ""
    text = cause.text[:1].upper() + cause.text[1:].rstrip(".")
    found_by = escape(_FOUND_BY.get(cause.kind, ""))
    lines = "".join(f"<li>{_remedy(line)}</li>" for line in cause.remedy)
    kind = escape(LABELS.get(cause.kind, cause.kind))
    return (
        f'<article class="validation"><h3>{number}. {kind}{place}</h3>'
        f'<p>{escape(text)}.</p><p class="says">{found_by}</p>'
        + (f"<p>What to do:</p><ul>{lines}</ul>" if lines else "")
        + "</article>"
    )


def _remedy(line: str) -> str:
    """A line, whose Python has a button that copies it; words may follow it."""
    code = line
    while code and not _is_python(code):
        code = code.rpartition(", ")[0]
    if not code:
        return escape(line)
    button = '<button class="copy" type="button" hidden>Copy</button>'
    rest = escape(line[len(code) :])
    return f'<code class="line">{escape(code)}</code>{rest} {button}'


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return "(" in text or "=" in text  # a word is Python too


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    lines = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return _section("Notes", "", f"<ul>{lines}</ul>")


# ---- cuts ----------------------------------------------------------------------------


def _says_of(cuts: Sequence[Cut]) -> str:
    weighed = "There is no strategy: every part weighs alike."
    if any(cut.name == "plain accumulation" for cut in cuts):
        weighed = (
            "The strategy weighs parts and single rows; plain accumulation weighs "
            "every part alike."
        )
    return f"How far each cut is from the gradient of all rows as one batch. {weighed}"


def _cuts(report: Findings) -> str:
    values = [cut.deviation for cut in report.cuts if cut.deviation is not None]
    rows = [
        Bar(
            escape(cut.name),
            cut.deviation,
            (_off(cut.deviation), cut.sizes_text),
            note=cut.note,
        )
        for cut in report.cuts
    ]
    heads = ("cut", "off by", "rows of each part")
    scale = Scale(values, report.rounding)
    return bars(rows, scale, heads, threshold=_rounding(report), style="cuts")


def _off(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def _rounding(report: Findings) -> str:
    return f"rounding: up to {report.rounding:.0e}"


# ---- layers --------------------------------------------------------------------------


def _by_layer(gradients: Sequence[Gradient]) -> list[Gradient]:
    """The gradients of the parameters of each module together, worst first."""
    found: dict[str, list[Gradient]] = defaultdict(list)
    for each in gradients:
        found[each.name.rpartition(".")[0] or each.name].append(each)
    layers = [
        Gradient(
            name,
            math.hypot(*(each.size for each in parameters)),
            math.hypot(*(each.off for each in parameters)),
        )
        for name, parameters in found.items()
    ]
    return sorted(layers, key=lambda each: -each.off)


def _layers(report: Findings, layers: Sequence[Gradient]) -> str:
    shown = [each for each in layers if each.size or each.off]
    if not shown:
        return ""
    scale = Scale([each.off for each in shown], report.rounding)
    heads = ["layer", "off by"]
    if shown[0].off > report.rounding:
        heads.append("of its own gradient")
    marks = {cause.place: n for n, cause in enumerate(report.causes, 1)}
    rows = [_layer(each, report.rounding, marks) for each in shown]
    body = bars(rows[:_MOST], scale, heads, threshold=_rounding(report))
    if len(rows) > _MOST:
        rest = bars(rows[_MOST:], scale, heads, threshold=_rounding(report))
        body += (
            f"<details><summary>{len(rows) - _MOST} more layers, each off by at most "
            f"{_off(shown[_MOST].off)}</summary>{rest}</details>"
        )
    none = len(layers) - len(shown)
    if none:
        body += (
            f'<p class="note">{none} more {"layers have" if none > 1 else "layer has"} '
            f"no gradient on these rows.</p>"
        )
    cut = next((c.name for c in report.cuts if c.deviation == report.deviation), "")
    says = (
        f"How far each layer is off, as a share of the size of the whole gradient. "
        f"Cut: {cut}.{' The scale is logarithmic.' * scale.is_log}"
    )
    return _section("Deviation by layer", says, body)


def _layer(layer: Gradient, rounding: float, marks: dict[str, int]) -> Bar:
    label = _name(layer.name)
    if layer.name in marks:
        label += f' <span class="tag">cause {marks[layer.name]}</span>'
    own = (_of_own(layer),) if layer.off > rounding else ()
    return Bar(label, layer.off, (_off(layer.off), *own))


def _of_own(layer: Gradient) -> str:
    if layer.off >= 100 * layer.size:
        return "over 100 times"
    share = layer.off / layer.size
    return f"{share:.1%}" if share >= 0.001 else f"{share:.1e}"


def _name(name: str) -> str:
    """A name as HTML that is broken behind its dots."""
    return escape(name).replace(".", ".<wbr>")


# ---- the end -------------------------------------------------------------------------


def _checked(report: Findings) -> list[tuple[str, str]]:
    others = ", ".join(f"{name} {version(name)}" for name in ("torch", "lightning"))
    return [
        ("rows", f"{report.num_rows} of the training data"),
        ("arithmetic", report.precision),
        ("deviation", f"{report.deviation:.2e} of the gradient's size"),
        ("rounding", f"up to {report.rounding:.0e}"),
        ("holds", "for these rows and this moment of the training"),
        ("versions", f"trainkit {__version__}, {others}"),
    ]


def _numbers(gradients: Sequence[Gradient]) -> str:
    if not gradients:
        return ""
    heads = ("parameter", "size of its gradient", "off by")
    lines = ["".join(f'<th scope="col">{head}</th>' for head in heads)]
    lines += [
        f'<th scope="row">{_name(each.name)}</th><td>{each.size:.2e}</td>'
        f"<td>{each.off:.2e}</td>"
        for each in gradients
    ]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return (
        f"<details><summary>All parameters in numbers, as shares of the whole "
        f'gradient\'s size</summary><div class="scroll"><table>{body}</table></div>'
        f"</details>"
    )
