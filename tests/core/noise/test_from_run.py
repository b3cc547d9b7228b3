"""The noise scale of an earlier run is read as it was written, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainkit.core.noise.estimate import NoiseEstimate
from trainkit.core.noise.from_run import read_noise_scale
from trainkit.errors import TrainkitError

ONE = NoiseEstimate(210.0, 160.0, 280.0, 512.0, 1.0, 120)


def folder(path: Path, summary: Any) -> Path:
    text = summary if isinstance(summary, str) else json.dumps(summary)
    (path / "summary.json").write_text(text)
    return path


def test_what_a_run_has_written_is_what_is_read(tmp_path: Path) -> None:
    assert read_noise_scale(folder(tmp_path, {"noise_scale": ONE.facts()})) == ONE
    assert read_noise_scale(str(tmp_path)) == ONE


def test_no_folder_and_no_summary_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainkitError, match=r"'.*gone', and there is no such folder"):
        read_noise_scale(tmp_path / "gone")
    with pytest.raises(TrainkitError, match=r"has no summary.json"):
        read_noise_scale(tmp_path)


@pytest.mark.parametrize(
    ("summary", "said"),
    [
        *((text, "summary.json must be JSON.*damaged") for text in ("", "[]", "{")),
        ('{"noise_scale": NaN}', "damaged"),
        ({}, r"measured none. Train with callbacks=\[NoiseScale\(\)\]"),
        ({"noise_scale": None, "advice": []}, r"measured none. Train with"),
        (
            {"noise_scale": None, "advice": [["noise scale", "one micro-batch."]]},
            r"It says: one micro-batch\. Train",
        ),
        ({"noise_scale": None, "advice": ["of another kind"]}, "damaged"),
        ({"noise_scale": {"samples": 1.0}}, r"is damaged: .*missing"),
        ({"noise_scale": [210]}, r"is damaged"),
        ({"noise_scale": {**ONE.facts(), "low": -1.0}}, r"is damaged: .*-1.0"),
        ({"noise_scale": {**ONE.facts(), "samples": "9"}}, r"is damaged"),
        (
            {"noise_scale": {**ONE.facts(), "samples": None, "high": None}},
            r"after 120 windows it knows at least 160 samples\. Measure more",
        ),
        ({"noise_scale": {**ONE.facts(), "high": None}}, r"knows at least 160 samples"),
        ({"noise_scale": {**ONE.facts(), "samples": 0, "low": 0}}, r"knows that of 0"),
    ],
)
def test_a_run_that_does_not_know_it_is_refused(
    summary: Any, said: str, tmp_path: Path
) -> None:
    with pytest.raises(TrainkitError, match=said):
        read_noise_scale(folder(tmp_path, summary))
