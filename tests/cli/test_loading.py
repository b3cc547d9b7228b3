"""The line that comes before torch and Lightning are loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import lightning.pytorch  # noqa: F401
import pytest

from trainkit.cli.loading import say_loading

LINE = "trainkit | {}: loading torch and Lightning ...\n"
RUNS = {
    "train": ["train", "experiment=demo"],
    "fit": ["fit", "--model=mine.Net"],
    "check": ["check", "train", "experiment=demo"],
    "plan": ["plan", "--probe", "--target", "8"],
}
ANSWERS = [
    ["--version"],
    ["train", "--help"],
    ["train", "--cfg", "job"],
    ["fit", "--help"],
    ["check", "--help"],
    ["check", "--json", "train"],
    ["plan", "--probe", "--target", "8", "--json"],
    ["plan", "--target", "8", "--max-micro-batch", "4"],
    ["train", "accumulation=nothing"],
]


def said_without_torch(words: list[str], folder: Path) -> str:
    """What a command prints where torch cannot be imported."""
    program = (
        f"import sys; sys.modules['torch'] = None\n"
        f"from trainkit.cli.main import main; main({words!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=folder,
    )
    return done.stdout


@pytest.mark.parametrize("command", RUNS)
def test_the_line_comes_before_torch(command: str, tmp_path: Path) -> None:
    assert said_without_torch(RUNS[command], tmp_path) == LINE.format(command)


@pytest.mark.parametrize("words", ANSWERS, ids=" ".join)
def test_what_only_answers_has_no_such_line(words: list[str], tmp_path: Path) -> None:
    assert "loading" not in said_without_torch(words, tmp_path)


def test_it_is_said_once_and_on_the_first_rank_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say_loading("train")  # this process has loaded Lightning
    assert capsys.readouterr().out == ""
    monkeypatch.delitem(sys.modules, "lightning.pytorch")
    monkeypatch.setenv("LOCAL_RANK", "1")
    say_loading("train")
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("LOCAL_RANK", "0")
    say_loading("train")
    assert capsys.readouterr().out == LINE.format("train")
