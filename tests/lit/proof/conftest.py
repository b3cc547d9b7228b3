"""Here what the proof warns of is an error, where a test does not expect it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            mark = pytest.mark.filterwarnings("error:proof. :UserWarning")
            item.add_marker(mark, append=False)  # a test may ask for another
