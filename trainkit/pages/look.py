"""Colours, numbers and axes of all charts and pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

LIGHT = {
    "paper": "#ffffff",
    "ink": "#1f2328",
    "quiet": "#5b6470",
    "faint": "#e3e6ea",
    "train": "#0072b2",
    "validation": "#d55e00",
    "plan": "#8a929c",
    "other1": "#009e73",
    "other2": "#b5548c",
    "other3": "#7a6a00",
    "other4": "#5a4fcf",
}
"""Colours by Okabe and Ito, or like them: people who are colour-blind can tell them
apart."""

DARK = {
    "paper": "#14171a",
    "ink": "#e6e8ea",
    "quiet": "#9aa4af",
    "faint": "#2b3036",
    "train": "#56b4e9",
    "validation": "#f0a03c",
    "plan": "#7d8792",
    "other1": "#3cc79c",
    "other2": "#e08fbd",
    "other3": "#d8c84a",
    "other4": "#a49cf5",
}

_WIDE = 30
"""An axis is logarithmic if the largest value is more than 30 times the least."""
_MOST = 6
"""How many powers of ten a logarithmic axis may name."""
_MARGIN = 0.06
_SIX_DIGITS = 1e-4
"""An axis spans at least this share of its largest value: six digits tell its labels
apart."""


def is_wide(least: float, most: float) -> bool:
    """Whether values between these two need a logarithmic axis.

    >>> is_wide(0.01, 1.0), is_wide(1.0, 2.0), is_wide(0.0, 1.0)
    (True, False, False)
    """
    return least > 0 and most / least > _WIDE


def limits(
    least: float, most: float, *, is_log: bool = False, from_zero: bool = False
) -> tuple[float, float]:
    """Where an axis begins and ends.

    >>> limits(0.0, 100.0, from_zero=True), limits(2.0, 2.0)
    ((0.0, 106.0), (1.8, 2.2))

    Args:
        least: the least value.
        most: the largest value.
        is_log: whether the axis is logarithmic.
        from_zero: whether the axis contains 0.
    """
    if is_log:
        factor = max(1.1, (most / least) ** _MARGIN) if least * 1e300 > most else 1.1
        return least / factor or least, most * factor
    if from_zero:
        least, most = min(least, 0.0), max(most, 0.0)
    if least == most:
        around = abs(least) * 0.1 or 1.0
        return (0.0, 1.0) if from_zero else (least - around, most + around)
    lacking = max(abs(least), abs(most)) * _SIX_DIGITS - (most - least)
    margin = max((most - least) * _MARGIN, lacking / 2)
    is_floor, is_roof = from_zero and least == 0, from_zero and most == 0
    return least - margin * (not is_floor), most + margin * (not is_roof)


def number(value: float) -> str:
    """A number in at most six digits.

    >>> number(0.1 + 0.2), number(24000.0), number(3e9), number(-0.0)
    ('0.3', '24,000', '3e+09', '0')
    >>> number(1234567.0), number(1234.5678), number(2e-5)
    ('1,234,567', '1,234.57', '2e-05')
    """
    if 1e6 <= abs(value) < 1e7:
        return f"{value:,.0f}"
    return f"{value + 0.0:,.6g}"


def new_figure(width: float, height: float, **options: Any) -> Figure:
    """A figure that `savefig` writes as a PNG, and that needs no window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, **options)
    FigureCanvasAgg(figure)
    return figure


def tidy(panel: Axes, *, grid: str = "both") -> None:
    """Draw a faint grid behind the data, and no frame above and on the right."""
    panel.grid(axis=grid, color=LIGHT["faint"], linewidth=0.6)  # type: ignore[arg-type]
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def label_decades(axis: Axis) -> None:
    """Label a logarithmic axis with numbers that do not run into each other.

    On a short axis matplotlib writes labels such as 6x10^-2, one over the other.
    """
    from matplotlib import ticker

    low, high = sorted(axis.get_view_interval())
    digits = (1, 2, 5) if high / low < 100 else (1,)
    several = ticker.LogLocator(subs=digits, numticks=_MOST)
    axis.set_minor_locator(ticker.NullLocator())
    axis.set_major_locator(ticker.MaxNLocator(4) if high / low < 5 else several)
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: number(value)))
