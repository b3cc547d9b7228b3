"""What draws the page is uPlot as it was published, and its licence goes with it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

import trainkit.cli.report
from tests.cli.report.runs import page_of, run_folder

FOLDER = Path(trainkit.cli.report.__file__).parent / "uplot"
VERSION = "1.6.32"
CHECKSUMS = {
    "uPlot.iife.min.js": "5b16e85a17eecc7bac76f68229682e426083ee3f",
    "uPlot.min.css": "67765ea7ba4809bf6f4bb691fac615673891c53c",
    "LICENSE": "142e28c88cdeaf9faaa9388c358953c400245d7d",
}


@pytest.mark.parametrize("name", CHECKSUMS)
def test_it_is_unchanged(name: str) -> None:
    assert hashlib.sha1((FOLDER / name).read_bytes()).hexdigest() == CHECKSUMS[name]


def test_a_page_carries_it_with_its_licence(tmp_path: Path) -> None:
    page = page_of(run_folder(tmp_path, [{"step": 0, "val/loss": 1.0}]))
    assert f"/* uPlot (v{VERSION}) */" in page
    assert (FOLDER / "LICENSE").read_text() in page
    assert f"uPlot {VERSION}" in (FOLDER / "README.md").read_text()
