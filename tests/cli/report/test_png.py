"""PNGs of the same charts; without matplotlib there are none, and this is said."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from matplotlib.image import imread

from tests.cli.report.runs import WINDOW, page_of, run_folder
from trainkit.cli.main import main
from trainkit.cli.report.look import LIGHT


def test_each_chart_has_a_png_and_an_old_one_goes(tmp_path: Path) -> None:
    rows = [{"step": n, "window/loss": 3.0 - n, "val/loss": 1.0} for n in range(3)]
    folder = run_folder(tmp_path, [*rows, {"step": 3, "window/weight": 8}])
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "padding.png").touch()  # of what is logged no more
    page_of(folder, pictures=True)
    names = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert names == {"loss.png", "weight.png"}
    pixels = (imread(tmp_path / "pictures" / "loss.png")[..., :3] * 255).round()
    colours = {tuple(map(int, each)) for each in pixels.reshape(-1, 3)}
    for style in ("train", "validation"):  # both lines are there
        red, green, blue = (int(LIGHT[style][at : at + 2], 16) for at in (1, 3, 5))
        assert (red, green, blue) in colours


def test_each_metric_has_one_of_its_own_and_those_of_others_stay(
    tmp_path: Path,
) -> None:
    """However it is called, also where A and a are one file."""
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "samples.png").touch()  # of a callback of the user's
    names = ["a/b", "a_b", "A_B", "x" * 300]
    folder = run_folder(tmp_path, [{"step": 0, **dict.fromkeys(names, 1.0)}])
    page_of(folder, pictures=True)
    found = sorted(path.name for path in (tmp_path / "pictures").iterdir())
    long = f"metric_{'x' * 100}.png"
    drawn = ["metric_A_B_3.png", "metric_a_b.png", "metric_a_b_2.png"]
    assert found == [*drawn, long, "samples.png"]


def test_without_matplotlib_it_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder(tmp_path, [{"step": 0, **WINDOW}])
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    assert main(["report", str(tmp_path)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert "no PNGs, for which matplotlib is needed" in first
    assert second == f"trainkit | report: {tmp_path / 'report.html'}"
    assert (tmp_path / "report.html").is_file()
    assert not (tmp_path / "pictures").exists()
