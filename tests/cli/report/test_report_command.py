"""`trainkit report`: again, of runs that ended anyhow, and what it refuses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.report.runs import WINDOW, charts_of, legends, page_of, run_folder
from tests.startup import CHILD_PATH
from trainkit.cli.main import main


def test_it_loads_neither_torch_nor_lightning(tmp_path: Path) -> None:
    run_folder(tmp_path, [{"step": 0, **WINDOW}])
    program = (
        "import sys; from trainkit.cli.main import main; "
        "status = main(['report', '--no-pictures', '.']); "
        "print(status, {'torch', 'lightning', 'hydra', 'wandb', 'matplotlib.pyplot'}"
        " & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": CHILD_PATH},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == "0 set()"
    assert (tmp_path / "report.html").is_file()


def test_a_row_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, [{"step": 0, "val/loss": 2.0}])
    with folder.path.joinpath("metrics.csv").open("a") as file:
        file.write("10,1.2")  # killed while 1.25 was written
    (chart,) = charts_of(folder).shown
    assert [line.shown for line in chart.lines] == [[(0, 2)]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            None,
            "RUN_DIR: must be the folder of a run, with metrics.csv in it, rec",
        ),
        (b"", "RUN_DIR: must have rows of numbers in metrics.csv, and .* has none yet"),
        (b"step,val/loss\n", "has none yet. Wait until the run"),
        (b"step,val/loss\n0,nan\n", "has none yet"),
        (b"step,val/loss\n0,\xff\n", "must be a table of numbers in UTF-8, and is dam"),
    ],
)
def test_what_has_no_rows_is_refused(
    content: bytes | None,
    message: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if content is not None:
        (tmp_path / "metrics.csv").write_bytes(content)
    assert main(["report", str(tmp_path)]) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert re.search(message, said), said
    assert not (tmp_path / "report.html").exists()


def test_a_folder_that_cannot_be_written_to_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_folder(tmp_path, [{"step": 0, "val/loss": 2.0}])
    (tmp_path / "report.html").mkdir()
    assert main(["report", str(tmp_path)]) == 2
    assert "RUN_DIR: its report cannot be written: " in capfd.readouterr().err


@pytest.mark.parametrize("text", ["{", '{"status": "finished"}', "[1]"])
def test_a_damaged_summary_is_named(
    text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_folder(tmp_path, [{"step": 0, "val/loss": 2.0}])
    (tmp_path / "summary.json").write_text(text)
    assert main(["report", str(tmp_path)]) == 2
    said = capfd.readouterr().err
    assert (
        "summary.json: must be JSON, as a run writes it at its end, and is damaged"
        in said
    )


@pytest.mark.parametrize(
    "plan",
    [
        "{",
        "[]",
        '{"steps": ["a"], "rates": {"lr-SGD": ["b"]}}',
        '{"steps": [0], "rates": {"lr-SGD": [1, 2]}}',
        '{"more": 1}',
    ],
)
def test_a_damaged_plan_is_as_good_as_none(plan: str, tmp_path: Path) -> None:
    folder = run_folder(tmp_path, [{"step": 0, "lr-SGD": 0.1}])
    (tmp_path / "learning_rate_plan.json").write_text(plan)
    page = page_of(folder)
    assert "No plan: " in page
    assert list(legends(page)["Learning rate"]) == ["lr-SGD"]
