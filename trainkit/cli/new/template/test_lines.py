"""A window of this training has the gradient of one big batch."""

from pathlib import Path

import pytest

from trainkit.cli.main import main


def test_a_window_is_the_big_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    assert main(["check", "train"]) == 0  # it prints why, if not
