"""`trainkit report`: of one run that ended anyhow, or several; what it refuses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.fresh import fresh
from tests.cli.report.runs import (
    WINDOW,
    cells,
    charts_of,
    drawn,
    ended,
    legends,
    run_folder,
    titles,
)
from trainkit.cli.main import main


def test_it_loads_neither_torch_nor_lightning(tmp_path: Path) -> None:
    run_folder(tmp_path, [{"step": 0, **WINDOW}])
    (done,) = fresh([["report", "--no-pictures", "."]], tmp_path)
    assert (done.status, done.err, done.loaded) == (0, "", ["numpy"])
    assert (tmp_path / "report.html").is_file()


def test_a_row_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, [{"step": 0, "val/loss": 2.0}])
    with folder.path.joinpath("metrics.csv").open("a") as file:
        file.write("10,1.2")  # killed while 1.25 was written
    (chart,) = charts_of(folder).values()
    assert [line.shown for line in chart.lines] == [[(0, 2)]]


RUNS = ("a", "multi/0", "multi/1", "single/0")
DAMAGED = {
    "bytes/metrics.csv": b"step,val/loss\n0,\xff\n",
    "list/config.yaml": b"- 1",
    "yaml/config.yaml": b"a: [\n b: }",
    "json/summary.json": b"{",
    "lacks/summary.json": b'{"status": "finished"}',
    "array/summary.json": b"[1]",
}
FILES = {
    "empty/metrics.csv": b"",
    "heads/metrics.csv": b"step,val/loss\n",
    "nan/metrics.csv": b"step,val/loss\n0,nan\n",
    **DAMAGED,
}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "RUN_DIR"),
        ("nowhere", "must be the folder of a run, with metrics.csv in it, or"),
        ("a nowhere", "must be the folder of a run, .*received .*/nowhere"),
        ("a a/metrics.csv", "must be the folder of a run, .*metrics.csv"),
        ("empty", "must have rows of numbers in metrics.csv, and .*/empty has none ye"),
        ("a empty", "must have rows of numbers in metrics.csv, and .*/empty has none"),
        ("heads", "has none yet. Wait until the run"),
        ("nan", "has none yet"),
        *(
            (f"a {file.partition('/')[0]}", f"{file}: must be as a run writes it, and")
            for file in DAMAGED
        ),
        ("a --to page.html", "--to: is for the page of several runs, and there is one"),
        ("a multi --to full/report.html", "the page cannot be written: .*Is a direct"),
        ("a multi --to no/p.html", "the page cannot be written: .*No such file"),
        ("a multi --to", "--to"),
        ("full", "trainkit report: the page cannot be written: "),
    ],
)
def test_wrong_input_has_one_message_and_writes_nothing(
    words: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    rows = [{"step": 0, "val/loss": 2.0, "lr": 1}]
    for name in (*RUNS, "full", *(file.partition("/")[0] for file in FILES)):
        run_folder(tmp_path / name, rows)
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "full/report.html").mkdir()  # in its place
    before = sorted(tmp_path.rglob("*"))
    assert main(["report", "--no-pictures", *words.split()]) == 2
    said = capfd.readouterr().err
    assert re.search(message, said, re.DOTALL), said
    assert sorted(tmp_path.rglob("*")) == before


EVIL = "</script><b>&{0}"


def made(path: Path, config: Mapping[str, Any] | None = None, loss: float = 2) -> Path:
    rows = [{"step": n, "window/loss": loss + n, "val/loss": loss} for n in range(3)]
    run_folder(path, rows)
    if config is not None:
        whole = {**config, "paths": {"run_dir": str(path)}, "save": f"{path}/x"}
        (path / "config.yaml").write_text(yaml.safe_dump(whole))
        (path / "overrides.yaml").write_text("[]")
    return path


def page_of(*words: object, to: Path) -> str:
    assert main(["report", *map(str, words), "--to", str(to)]) == 0
    return to.read_text(encoding="utf-8")


def test_a_line_for_each_run_and_a_table_of_what_differs(tmp_path: Path) -> None:
    one = made(tmp_path / "one", {"model": {"width": 4}, "lr": 0.1, "seed": 0}, loss=2)
    two = made(tmp_path / "two", {"model": {"width": 8}, "seed": 0, "name": EVIL})
    page = page_of(one, two, to=tmp_path / "page.html")
    assert titles(page) == ["Loss: window/loss", "Loss: val/loss"]
    for chart in legends(page).values():
        assert [label.split(":")[0] for label in chart] == ["one", "two"]
    for title in titles(page):
        assert len(drawn(page, title)) == 2
    assert cells(page, "runs") == {
        "": ["one", "two"],
        "model.width": ["4", "8"],
        "lr": ["0.1", "–"],
        "name": ["–", EVIL],
        "training": ["has not ended, or was killed; its last row is of step 2"] * 2,
    }
    assert "Values of their configurations that differ: 3" in page
    assert EVIL not in page
    assert escape(EVIL) in page


def test_numbers_of_a_run_that_ended_are_from_its_summary(tmp_path: Path) -> None:
    """The folders of the runs are no difference."""
    runs = [made(tmp_path / name, {"seed": 0}) for name in "ab"]
    ended(runs[0], metrics={"test/acc": 0.5}, steps=3)
    page = page_of(*runs, to=tmp_path / "page.html")
    assert "configurations that differ: 0" in page
    rows = cells(page, "runs")
    assert rows["training"][0] == "finished after 3 optimizer steps"
    assert rows["test/acc"] == ["0.5", "–"]
    assert rows["val/loss"] == ["–", "2 at step 2"]


def test_runs_with_other_units_share_no_chart(tmp_path: Path) -> None:
    for unit in ("tokens", "samples", "more"):
        rows = [{"step": 1, "window/weight": 8, "acc": 1}]
        run_folder(tmp_path / unit, rows)
        ended(tmp_path / unit, unit=unit.replace("more", "samples"))
    page = page_of(tmp_path, to=tmp_path / "page.html")
    shown = {title: list(lines) for title, lines in legends(page).items()}
    assert shown["Window weight, in tokens"] == ["tokens"]
    assert shown["Window weight, in samples"] == ["more", "samples"]
    assert shown["acc"] == ["more", "samples", "tokens"]  # the control


def test_the_folder_of_a_multirun_stands_for_its_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (0, 2, 10):
        made(tmp_path / "multi" / str(number), {"seed": number})
    crashed = tmp_path / "multi" / "3"
    crashed.mkdir()
    (crashed / "overrides.yaml").write_text("[]")
    other = made(tmp_path / "other" / "2", {"seed": 5})
    again = tmp_path / "multi" / "2"  # counts once
    page = page_of(tmp_path / "multi", other, again, to=tmp_path / "page.html")
    assert cells(page, "runs")[""] == ["multi/0", "multi/2", "multi/10", "other/2"]
    assert f"Left out: {crashed} (no metrics.csv)" in page
    assert f"left out: {crashed} (no metrics.csv)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "page", "said"),
    [("a b", "runs.html", "2 runs in "), ("single", "single/0/report.html", "")],
)
def test_the_page_is_written_here_unless_it_is_told_where(
    words: str,
    page: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("a", "b", "single/0"):
        made(tmp_path / name)
    assert main(["report", "--no-pictures", *words.split()]) == 0
    assert capsys.readouterr().out == f"trainkit | report: {said}{tmp_path / page}\n"
    assert list(tmp_path.rglob("*.html")) == [tmp_path / page]
