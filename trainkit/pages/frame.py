"""The frame of every page: one file without scripts, other files and network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from trainkit.pages.look import LIGHT

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
