"""Horizontal bars beside a threshold, drawn without scripts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from trainkit.pages.look import is_wide, number

_LEAST = -20
"""The power of ten below which nothing is drawn."""
_MOST_TICKS = 7


@dataclass(frozen=True)
class Bar:
    """A row of a table of bars.

    Attributes:
        label: as HTML.
        value: the bar's length; None where there is no value.
        texts: the cells behind it.
        note: what stands in place of a missing bar.
    """

    label: str
    value: float | None
    texts: tuple[str, ...]
    note: str = ""


class Scale:
    """The axis of bars: from 0, or logarithmic where 0 would hide what is to be seen.

    >>> scale = Scale([0.5, 0.25], threshold=1e-8)
    >>> scale.is_log, scale.share(0.25), [text for _, text in scale.ticks()]
    (False, 0.5, ['0', '0.1', '0.2', '0.3', '0.4', '0.5'])
    >>> scale = Scale([1e-16, 1e-15], threshold=1e-8)
    >>> scale.is_log, [text for _, text in scale.ticks()]
    (True, ['1e-17', '1e-15', '1e-13', '1e-11', '1e-09', '1e-07'])

    Args:
        values: that are to be shown.
        threshold: a line that is always on the axis.
    """

    def __init__(self, values: Sequence[float], threshold: float) -> None:
        finite = [value for value in values if 0 < value < math.inf]
        above = [value for value in finite if value > threshold]
        self.threshold = threshold
        has_below = len(above) < len(finite)
        self.is_log = not above or has_below or is_wide(min(above), max(above))
        if not self.is_log:
            self._by, self._count = _even(max(above))
            return
        least, most = min([*finite, threshold]) / 2, max([*finite, threshold * 10])
        high = math.ceil(math.log10(most))
        decades = high - max(_LEAST, math.floor(math.log10(least)))
        self._by = math.ceil(decades / _MOST_TICKS)
        self._count = math.ceil(decades / self._by)
        self._low = high - int(self._by) * self._count

    def share(self, value: float) -> float:
        """How much of the width the bar of a value takes."""
        if not value > 0:
            return 0.0
        if not self.is_log:
            return min(1.0, value / (self._by * self._count))
        at = (_log10(value) - self._low) / (self._by * self._count)
        return min(1.0, max(0.0, at))

    def ticks(self) -> list[tuple[float, str]]:
        """Where numbers stand along the axis, and which."""
        places = range(self._count + 1)
        if self.is_log:
            texts = [f"1e{self._low + int(self._by) * n:+03d}" for n in places]
        else:
            texts = [number(self._by * n) for n in places]
        return [(n / self._count, text) for n, text in zip(places, texts, strict=True)]


def bars(
    rows: Sequence[Bar],
    scale: Scale,
    heads: Sequence[str],
    *,
    threshold: str,
    style: str = "",
) -> str:
    """A table in which each row has a bar; those above the threshold stand out.

    Args:
        rows: from top to bottom.
        scale: of all bars.
        heads: over the labels, and over each cell behind the bars.
        threshold: what the threshold is called.
        style: another class of the table.
    """
    first, *others = heads
    at = scale.share(scale.threshold)
    side = "left" if at < 0.5 else "right"
    numbers = "".join(
        f'<span style="left:{100 * place:.2f}%">{text}</span>'
        for place, text in scale.ticks()
    )
    line = f'<b class="{side}">{escape(threshold)}</b>'
    cells = "".join(f'<th scope="col">{escape(head)}</th>' for head in others)
    steps = len(scale.ticks()) - 1
    return (
        f'<table class="bars {style}" '
        f'style="--threshold:{100 * at:.2f}%;--steps:{steps}">'
        f'<thead><tr><th scope="col">{escape(first)}</th>'
        f'<td class="scale"><div>{line}{numbers}</div></td>{cells}</tr></thead>'
        f"<tbody>{''.join(_row(row, scale) for row in rows)}</tbody></table>"
    )


def _row(row: Bar, scale: Scale) -> str:
    bar = f'<span class="note">{escape(row.note)}</span>'
    if row.value is not None:
        style = "validation" if row.value > scale.threshold else "other1"
        width = 100 * scale.share(row.value)
        bar = f'<i class="{style}" style="width:{width:.2f}%"></i>'
    cells = "".join(f"<td>{escape(text)}</td>" for text in row.texts)
    return (
        f'<tr><th scope="row">{row.label}</th><td class="bar"><div>{bar}</div></td>'
        f"{cells}</tr>"
    )


def _even(most: float) -> tuple[float, int]:
    """A round step, and how many of them reach a value."""
    power = 10.0 ** math.floor(math.log10(most / _MOST_TICKS))
    by = next(
        float(f"{digit * power:.6g}")
        for digit in (1, 2, 5, 10)
        if digit * power * _MOST_TICKS >= most
    )
    return by, math.ceil(float(f"{most / by:.6g}"))


def _log10(value: float) -> float:
    return math.inf if value == math.inf else math.log10(value)
