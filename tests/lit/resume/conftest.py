"""What tests of interrupted runs have in common."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers import quiet_lightning


@pytest.fixture
def quiet(capsys: Any) -> Any:
    with quiet_lightning():
        yield
