"""One run for all that only look at it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.evaluate.runs import trained


@pytest.fixture(scope="package")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(where)
        patch.setattr("sys.argv", ["trainkit"])
        return trained(where)
