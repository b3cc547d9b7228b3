"""What the tests of completion share."""

from __future__ import annotations

from pathlib import Path

import pytest

STRATEGIES = [
    "none",
    "per_class_weight",
    "per_sample",
    "per_token",
    "uniform",
    "weighed",
]


@pytest.fixture(autouse=True)
def _private_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
