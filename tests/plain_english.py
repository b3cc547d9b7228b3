"""A check for phrases that have to be read twice: `python -m tests.plain_english`.

It reads docstrings, comments and text in `trainkit/` and `recipes/`, comments in
`conf/`, and every README.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDERS = ("trainkit", "recipes", "conf")


class Phrase(NamedTuple):
    """A banned phrase, and what to say instead."""

    pattern: str
    instead: str


BANNED = [
    Phrase(r"(?:^|[.!?] )(?:The same|That of|Those of)\b", "say what it is"),
    Phrase(r"(?<!there\s)\b(?:is|are|was|were) none\b", "is not a ..., has no ..."),
    Phrase(r"\b(?:is|are|was|were|be|been) told\b(?! apart)", "announced, known"),
    Phrase(r"\b(?:go|goes|going|gone|went) on\b", "resume, continue"),
    Phrase(r"\bsays of\b", "name what it returns or sets"),
    Phrase(r"\b(?:Whoever|whoever)\b", "name the caller, the user or the process"),
    Phrase(r"\bas ever\b", "as before, as usual"),
    Phrase(r"\bspoken of\b", "mentioned, reported"),
    Phrase(r"\bits own ones\b", "its own, with the noun"),
    Phrase(r"\bfor nothing\b", "without effect, not at all"),
    Phrase(r"\bof before\b", "earlier, previous"),
]


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """Each text that a person reads in a file, with the line where it begins."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.lineno, node.value
        yield from _blocks(_comments(source))
    elif path.suffix == ".yaml":
        lines = enumerate(source.splitlines(), 1)
        found = ((n, re.search(r"(?:^|\s)#(.*)", line)) for n, line in lines)
        yield from _blocks((n, match[1]) for n, match in found if match)
    else:
        yield 1, source


def complaints(root: Path, banned: list[Phrase] = BANNED) -> list[str]:
    """Every banned phrase under a root, as `file:line: phrase; say instead`."""
    found = []
    for path in _files(root):
        name = path.relative_to(root).as_posix()
        for line, text in texts_of(path):
            for phrase in banned:
                # a phrase may be cut by the end of a line
                for match in re.finditer(phrase.pattern.replace(" ", r"\s+"), text):
                    at = line + text.count("\n", 0, match.start())
                    said = " ".join(match[0].split()).strip(".!? ")
                    found.append(f"{name}:{at}: {said!r}; say: {phrase.instead}")
    return found


def _files(root: Path) -> list[Path]:
    found = [root / "README.md"]
    for folder in FOLDERS:
        for pattern in ("*.py", "*.yaml", "README.md"):
            found += (root / folder).rglob(pattern)
    return sorted(path for path in found if path.is_file())


def _comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#")


def _blocks(lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Comments on neighbouring lines as one text."""
    block: list[str] = []
    begin = 0
    for number, text in lines:
        if block and number != begin + len(block):
            yield begin, "\n".join(block)
            block = []
        if not block:
            begin = number
        block.append(text.strip())
    if block:
        yield begin, "\n".join(block)


if __name__ == "__main__":
    found = complaints(ROOT)
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(bool(found))
