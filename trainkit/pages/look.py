"""How pages and pictures look: their frame, tables, colours and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

LIGHT = {
    "paper": "#ffffff",
    "ink": "#1f2328",
    "quiet": "#5b6470",
    "faint": "#e3e6ea",
    "train": "#0072b2",
    "validation": "#d55e00",
    "other1": "#009e73",
    "other2": "#b5548c",
    "other3": "#7a6a00",
    "other4": "#5a4fcf",
}
"""Colours by Okabe and Ito, or like them: people who are colour-blind can tell them
apart. `page.css` has them for dark systems."""


def number(value: float) -> str:
    """A number in at most six digits.

    >>> number(0.1 + 0.2), number(24000.0), number(3e9), number(-0.0)
    ('0.3', '24,000', '3e+09', '0')
    >>> number(1e6), number(-1234567.0), number(1e7), number(1234.5678), number(2e-5)
    ('1,000,000', '-1,234,567', '1e+07', '1,234.57', '2e-05')
    """
    if 1e6 <= abs(value) < 1e7:
        return f"{value:,.0f}"
    return f"{value + 0.0:,.6g}"


# The page fetches and runs nothing, whatever a metric or a module is called.
_FRAME = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root{{color-scheme:light;{light}}}
{style}</style>
</head>
<body>
<h1>{title}</h1>
<p class="where">{where}</p>
{body}
</body>
</html>
"""


def framed(body: str, *, title: str, where: str) -> str:
    """A page with our style, in the colours of the system's theme.

    Args:
        body: what stands below the heading, as HTML.
        title: its heading, as text.
        where: the line below the heading, as text.
    """
    return _FRAME.format(
        light="".join(f"--{name}:{colour};" for name, colour in LIGHT.items()),
        style=Path(__file__).with_name("page.css").read_text(encoding="utf-8"),
        title=escape(title),
        where=escape(where),
        body=body,
    )


def table(rows: Sequence[Sequence[str]], kind: str = "summary") -> str:
    """A table of texts; a row whose first cell is empty has the heads of columns."""
    lines = ""
    for head, *cells in rows:
        cell = "td" if head else "th"
        texts = "".join(f"<{cell}>{escape(text)}</{cell}>" for text in cells)
        lines += f'<tr><th scope="row">{escape(head)}</th>{texts}</tr>'
    return f'<div class="scroll"><table class="{kind}">{lines}</table></div>'
