"""The frame of every page: one file that needs no other file and no network."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from trainkit.pages.look import DARK, LIGHT

Row = tuple[str, str]

_HERE = Path(__file__).parent

_NOT_LINES = ("paper", "ink", "quiet", "faint")
# The page fetches nothing, whatever a metric or a module is called.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"

_FRAME = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<header><h1>{title}</h1><button id="theme" type="button" hidden>Dark</button></header>
<p class="where">{where}</p>
{body}
<script>
{script}</script>
</body>
</html>
"""


def framed(
    body: str, *, title: str, where: str, style: str = "", script: str = ""
) -> str:
    """A page with our colours, our style and the switch between light and dark.

    Args:
        body: what stands below the heading, as HTML.
        title: its heading, as text.
        where: the line below the heading, as text.
        style: CSS that stands before ours.
        script: what runs after our own script.
    """
    return _FRAME.format(
        policy=_POLICY,
        style=_colours() + style + text_of(_HERE / "page.css"),
        script=text_of(_HERE / "frame.js") + script,
        title=escape(title),
        where=escape(where),
        body=body,
    )


def text_of(file: Path) -> str:
    """The text of a style or a script, without the address in uPlot's comment."""
    text = file.read_text(encoding="utf-8")
    return re.sub(r"/\*! https\S+ (.*?) \*/", r"/* uPlot \1 */", text)


def summary_table(rows: Sequence[Row]) -> str:
    """The table on top of a page."""
    lines = "".join(
        f'<tr><th scope="row">{escape(label)}</th><td>{escape(text)}</td></tr>'
        for label, text in rows
    )
    return f'<table class="summary">{lines}</table>'


def _colours() -> str:
    """The colours as CSS: those of the system's theme, or of the page's switch."""
    light, dark = (
        "".join(f"--{name}:{colour};" for name, colour in colours.items())
        for colours in (LIGHT, DARK)
    )
    lines = (name for name in LIGHT if name not in _NOT_LINES)
    styles = "".join(f".{name}{{--line:var(--{name})}}" for name in lines)
    return (
        f"{styles}\n:root{{color-scheme:light;{light}}}\n"
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light])"
        f"{{color-scheme:dark;{dark}}}}}\n"
        f":root[data-theme=dark]{{color-scheme:dark;{dark}}}\n"
    )
