"""Each test is alone in a folder of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.fit.lightning_user import stand_alone


@pytest.fixture(autouse=True)
def alone(monkeypatch: Any, tmp_path: Path) -> None:
    stand_alone(monkeypatch, tmp_path)
