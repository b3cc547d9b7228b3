"""Figures as SVG that stands inside a page and takes its colours from it."""

from __future__ import annotations

import io
import re
from html import escape
from typing import TYPE_CHECKING, Any

from trainkit.pages.look import LIGHT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))
_HEAD = re.compile(r'^.*?<svg [^>]*(viewBox="[^"]*")[^>]*>', re.DOTALL)
_NOT_NEEDED = re.compile(
    r""" id="[\w.]+_\d+"| xmlns:xlink="[^"]*"| transform="rotate\(-0 [^"]*"|"""
    r""" font-family: [^;"]*;|<g/>|\n *"""
)
_PLACES = re.compile(r' d="[^"]*"')
_DIGITS = re.compile(r"(\.\d)\d+")


def inline_svg(figure: Figure, *, name: str, said: str, **options: Any) -> str:
    """The figure as an element of a page.

    Its lines and texts are in the colours of `LIGHT` by name, so that the page may
    change them, and its texts are in the font of the page.

    Args:
        figure: drawn in no other colours than those of `LIGHT`.
        name: tells it apart from the other figures of the page.
        said: what it shows, for readers who cannot see it.
        options: of `Figure.savefig`.
    """
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        options |= {"metadata": _NO_METADATA, "facecolor": "none"}
        figure.savefig(file, format="svg", **options)
    text = _NOT_NEEDED.sub("", file.getvalue())
    text = _PLACES.sub(lambda path: _DIGITS.sub(r"\1", path[0]), text)
    for colour, value in LIGHT.items():
        text = text.replace(value, f"var(--{colour})")
    head = f'role="img" aria-label="{escape(said)}"'
    return _HEAD.sub(lambda found: f"<svg {found[1]} {head}>", text)
