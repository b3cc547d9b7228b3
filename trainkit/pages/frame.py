"""The frame of every page: one file without scripts, other files and network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from trainkit.pages.look import DARK, LIGHT

Row = tuple[str, str]

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
@media screen and (prefers-color-scheme:dark){{:root{{color-scheme:dark;{dark}}}}}
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
    light, dark = (
        "".join(f"--{name}:{colour};" for name, colour in colours.items())
        for colours in (LIGHT, DARK)
    )
    return _FRAME.format(
        light=light,
        dark=dark,
        style=Path(__file__).with_name("page.css").read_text(encoding="utf-8"),
        title=escape(title),
        where=escape(where),
        body=body,
    )


def summary_table(rows: Sequence[Row]) -> str:
    """The table on top of a page."""
    lines = "".join(
        f'<tr><th scope="row">{escape(label)}</th><td>{escape(text)}</td></tr>'
        for label, text in rows
    )
    return f'<table class="summary">{lines}</table>'
