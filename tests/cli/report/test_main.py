"""`trainkit report`: again, of runs that ended anyhow, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.fresh import fresh
from tests.cli.report.runs import WINDOW, charts_of, run_folder
from trainkit.cli.main import main


def test_it_loads_neither_torch_nor_lightning(tmp_path: Path) -> None:
    run_folder(tmp_path, [{"step": 0, **WINDOW}])
    (done,) = fresh([["report", "--no-pictures", "."]], tmp_path)
    assert (done.status, done.err, done.loaded) == (0, "", [])
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
    "times/step_times.csv": b"step,seconds\n1,x\n",
    "noseconds/step_times.csv": b"time\n2\n",
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
