"""The words of a command line: their order, and what asks for the same again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from trainkit.cli.words import (
    find_modules_here,
    key_of,
    option,
    options_first,
    quoted,
    unquoted,
)
from trainkit.errors import TrainkitError


@pytest.mark.parametrize(
    ("given", "ordered"),
    [
        ([], []),
        (["a=1", "-m", "b=2"], ["--multirun", "a=1", "b=2"]),
        (["a=1", "-cd", "c=d e", "b=2"], ["--config-dir=c=d e", "a=1", "b=2"]),
        (["--config-name", "mine", "a=1"], ["--config-name=mine", "a=1"]),
        (["a=1", "-c", "job", "~b"], ["--cfg=job", "a=1", "~b"]),
        (["--info", "-m", "a=1"], ["--multirun", "--info=all", "a=1"]),
        (["--info", "searchpath"], ["--info=searchpath"]),
        (["a='-m'", "+b=-1"], ["a='-m'", "+b=-1"]),
    ],
)
def test_options_come_first_with_their_values(
    given: list[str], ordered: list[str]
) -> None:
    assert options_first(given) == ordered
    assert options_first(ordered) == ordered  # again is nothing


@pytest.mark.parametrize("words", [["-cn"], ["-cn", "-m"], ["--seed=1"], ["-c", "x"]])
def test_what_is_no_option_is_refused(words: list[str]) -> None:
    with pytest.raises(TrainkitError, match=r"trainkit train: .*have no dashes, as in"):
        options_first(words)


def test_the_last_of_an_option_counts() -> None:
    words = ["--config-dir=a", "--config-dir=b=c", "a=1"]
    assert option(words, "--config-dir") == "b=c"
    assert option(words, "--config-name") is None


def test_keys_and_quotes() -> None:
    assert key_of("++a.b@c=1") == "a.b"
    assert quoted("it's here") == r"'it\'s here'"


@pytest.mark.parametrize(
    "text", ["it's", r"a\b", "end\\", r"\'", "'", "''", "\\\\", "ü (x), [y] {z} = #"]
)
def test_what_is_quoted_is_the_text_to_hydra_and_to_us(text: str) -> None:
    word = f"key={quoted(text)}"
    assert OverridesParser.create().parse_override(word).value() == text
    assert unquoted(quoted(text)) == text


def test_modules_of_the_current_folder_are_found_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["/somewhere"])
    find_modules_here()
    find_modules_here()
    assert sys.path == [str(tmp_path), "/somewhere"]
