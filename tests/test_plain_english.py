"""The check for plain English finds a banned phrase wherever a person reads it."""

from __future__ import annotations

from pathlib import Path

from tests.plain_english import ROOT, complaints

MODULE = '''"""The same, for two."""

def whoever(told):  # a name is code, and is not read
    # The run goes
    # on, as before.
    raise ValueError(
        f"seed {told}: it is "
        "none"
    )
'''


def test_finds_phrases_in_docstrings_comments_messages_and_pages(tmp_path: Path):
    for folder in ("trainkit", "conf", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "trainkit/a.py").write_text(MODULE)
    (tmp_path / "tests/a.py").write_text(MODULE)
    (tmp_path / "conf/a.yaml").write_text("a: as ever # as\n# ever\n")
    (tmp_path / "README.md").write_text("One.\n\nIt was\n  told of it.\n")
    assert complaints(tmp_path) == [
        "README.md:3: 'was told'; say: announced, known",
        "conf/a.yaml:1: 'as ever'; say: as before, as usual",
        "trainkit/a.py:1: 'The same'; say: say what it is",
        "trainkit/a.py:7: 'is none'; say: is not a ..., has no ...",
        "trainkit/a.py:4: 'goes on'; say: resume, continue",
    ]


def test_finds_nothing_here():
    assert complaints(ROOT) == []
