"""The page of a run is whole in itself, says what the rows say, and is left by it."""

from __future__ import annotations

import re
import sys
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.report.runs import (
    WINDOW,
    cells,
    charts_of,
    drawn,
    ended,
    legends,
    page_of,
    run_folder,
    titles,
)
from tests.cli.training import summary_of, the_run, train
from trainkit.cli.main import main
from trainkit.cli.report.charts import Line
from trainkit.cli.report.page import report_of_training
from trainkit.cli.runs.folder import RunFolder
from trainkit.cli.runs.summary import throughput_text
from trainkit.pages import look
from trainkit.pages.look import LIGHT, number


def test_every_value_that_was_logged_is_drawn_and_the_last_is_named(
    tmp_path: Path,
) -> None:
    rows = [{"step": 10 * n, **WINDOW, "window/loss": 3 - n} for n in range(3)]
    page = page_of(run_folder(tmp_path, [*rows, {"step": 20, "val/loss": 1.75}]))
    assert legends(page)["Loss"] == {
        "window/loss": "1 at step 20",
        "val/loss": "1.75 at step 20",
    }
    assert page.count("<svg ") == len(titles(page)) + 1 == 8  # the loss is there twice
    train, validation = drawn(page, "Loss")
    left, top, middle, half, right, bottom = train[0][:6]
    assert middle == pytest.approx((left + right) / 2, abs=0.2)
    assert half == pytest.approx((top + bottom) / 2, abs=0.2)
    assert left < middle < right
    assert top < half < bottom
    x, y = validation[0][:2]
    assert x == right
    assert y == pytest.approx(bottom - 0.375 * (bottom - top), abs=0.2)


@pytest.mark.parametrize("count", [1000, 2000])
def test_a_thousand_values_are_all_drawn_and_more_are_a_mean_in_a_band(
    count: int, tmp_path: Path
) -> None:
    values = [2 + n * 4 % 7 / 10 for n in range(count)]
    values[777] = 9.5
    rows = [{"step": n, "metric": value} for n, value in enumerate(values)]
    page = page_of(run_folder(tmp_path, rows))
    (line,) = drawn(page, "metric")
    num_points = sum(len(piece) // 2 for piece in line)
    # straight runs join
    assert num_points > 800 if count == 1000 else 100 < num_points <= 250
    assert page.count("fill-opacity: 0.25") == (2 if count > 1000 else 0)
    assert cells(page, "numbers")["metric"][5] == "9.5"  # the peak is in the numbers
    *_, high = Line("", [*range(count)], values).thinned()
    assert max(high or values) == 9.5
    assert max(values[::4]) < 9.5  # the control: what thinning must not be
    assert len(page.encode()) < 100_000


def test_many_lines_of_many_rows_stay_small(tmp_path: Path) -> None:
    names = [f"window/{n}/{key}" for n in range(4) for key in ("loss", "weight")]
    names += [f"lr-Adam/pg{n}" for n in range(12)]
    rows = [
        {"step": n, **{name: 1 + (n * 7919 % 104729) / 104729 for name in names}}
        for n in range(1001)
    ]
    page = page_of(run_folder(tmp_path, rows))
    assert sum(map(len, legends(page).values())) == len(names)
    assert len(page.encode()) < 16_000 * len(names)


EVIL = "</svg><img src=x onerror=alert(1)>&{0}$x^$"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a run that has all charts of our own, and one whose name is markup."""
    rows = [{"step": n, **WINDOW, "val/loss": 1, EVIL: 1.0} for n in range(3)]
    return page_of(run_folder(tmp_path_factory.mktemp("runs") / "<b>run", rows))


def test_it_runs_nothing_and_needs_no_other_file_and_no_network(page: str) -> None:
    assert "default-src 'none'; style-src 'unsafe-inline'\"" in page
    assert not re.search(r"<script|\b(src|href)=\"(?!#)|url\((?!#)|@import", page)
    assert not re.search(r"https?:|<[^>]*\bon\w+=", page)
    assert page.count('href="#') > 0  # the control: within an SVG


def test_names_are_no_markup_and_identifiers_are_used_once(page: str) -> None:
    assert "<img" not in page
    assert "<b>run" not in page
    assert list(legends(page)[EVIL]) == [EVIL]
    known = re.findall(r'\bid="(.*?)"', page)
    assert len(known) == len(set(known)) > 8
    assert set(re.findall(r"(?:url\(|href=\")#(\w+)", page)) <= set(known)


def test_the_colours_are_those_of_the_readers_system(page: str) -> None:
    """What is drawn names them, and they are defined twice."""
    assert "@media screen and (prefers-color-scheme:dark){:root{" in page
    for name, value in LIGHT.items():
        first, second = re.findall(rf"--{name}:(#\w+)", page)
        assert first == value != second
    for svg in re.findall("<svg .*?</svg>", page):
        assert "var(--train)" in svg
        assert "var(--quiet)" in svg
        assert not re.search(r":\s*#", svg)  # no other colour


@pytest.mark.parametrize(
    ("losses", "pieces", "numbers"),
    [
        ("3 2 nan inf 2 1", [4, 4], ["4", "2", "3", "1", "1", "3", "0 to 5"]),
        ("3 2 2.5", [6], ["3", "0", "3", "2.5", "2", "3", "0 to 2"]),
    ],
)
def test_what_is_not_finite_leaves_a_gap_and_the_lines_are_there_in_numbers(
    losses: str, pieces: list[int], numbers: list[str], tmp_path: Path
) -> None:
    rows = [{"step": n, "val/loss": loss} for n, loss in enumerate(losses.split())]
    page = page_of(run_folder(tmp_path, rows))
    (line,) = drawn(page, "Loss")
    assert [len(piece) for piece in line] == pieces
    assert cells(page, "numbers") == {
        "": ["values", "not finite", "first", "last", "least", "largest", "steps"],
        "val/loss": numbers,
    }


def test_a_report_that_cannot_be_drawn_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A training must not fail because of it; without rows there is none."""
    folder = run_folder(tmp_path, [])
    report_of_training(folder, pictures=True)
    assert capsys.readouterr().out == ""
    run_folder(tmp_path, [{"step": 1, "val/loss": 1}])
    (tmp_path / "report.html").mkdir()  # in its place
    report_of_training(folder, pictures=False)
    said = capsys.readouterr().out
    assert said.startswith("trainkit | report: could not be drawn: IsADirectoryError")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("last_step", "facts", "said"),
    [
        (4, {}, ("training", "finished after 4 optimizer steps")),
        (4, {}, ("plain accumulation", "off by 5.8% of their size")),
        (4, {}, ("last step", "batch 4 x accumulation 4 x ranks 2 = 32 samples")),
        (4, {}, ("time", "10.6 s")),
        (4, {}, ("versions", "torch 2.13.0")),
        (4, {"git_commit": "abc+"}, ("commit", "abc+")),
        (9, {}, ("since then", "resumed, up to step 9")),
        (
            3,
            None,
            ("training", "has not ended, or was killed; its last row is of"),
        ),
        (3, None, ("val/loss", "2.5 at step 3")),
        (3, {"effective_batch": None}, ("training", "finished after 4")),
    ],
)
def test_the_table_on_top_is_the_summary(
    last_step: int, facts: dict[str, Any] | None, said: tuple[str, str], tmp_path: Path
) -> None:
    folder = run_folder(tmp_path, [{"step": last_step, "val/loss": 2.5}])
    if facts is not None:
        ended(tmp_path, **facts)
    top = cells(page_of(folder), "summary")
    assert said[1] in top[said[0]][0]
    assert ("since then" in top) == (last_step == 9)


# ---- the page that `trainkit train` leaves -------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training with everything that a chart is of."""
    where = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(where)
        patch.setattr(sys, "argv", ["trainkit"])
        scaling = ["lr_scaling=sqrt", "lr_scaling.reference_batch=2"]
        schedule = ["schedule=stages", "schedule.sizes={0:1,2:4}", "schedule.unit=step"]
        words = ["trainer.max_steps=4", "report=true"]
        assert train(*scaling, *schedule, *words) == 0
    return the_run(where)


def lines(run: Path, title: str) -> dict[str, list[tuple[float, float]]]:
    chart = charts_of(RunFolder(run))[title]
    return {line.name: line.shown for line in chart.lines}


def test_a_run_leaves_its_report_and_pictures(run: Path) -> None:
    page = (run / "report.html").read_text(encoding="utf-8")
    assert titles(page)[:7] == [
        *("Loss", "Window weight, in tokens", "Imbalance", "Learning rate"),
        *("Accumulation", "Gradient norm", "Padding"),
    ]
    assert set(lines(run, "Loss")) == {"window/loss", "val/loss"}
    windows = lines(run, "Accumulation")["window/micro_batches"]
    assert [value for _, value in windows] == [1, 1, 4, 4]
    assert "finished after 4 optimizer steps" in page
    assert throughput_text(summary_of(run)["throughput"]) in unescape(page)
    names = {path.stem for path in (run / "pictures").iterdir()}
    assert names >= {"loss", "weight", "learning_rate", "grad_norm", "padding"}


def test_it_can_be_made_again_to_the_letter(run: Path) -> None:
    path = run / "report.html"
    before = path.read_bytes()
    path.unlink()
    assert main(["report", "--no-pictures", str(run)]) == 0
    assert path.read_bytes() == before


def test_a_resumed_run_has_each_step_once(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run)
    where = f"ckpt_path={run / 'checkpoints' / 'last.ckpt'}"
    assert train(where, "trainer.max_steps=6", "pictures=false", small=[]) == 0
    assert summary_of(run)["throughput"]["steps"] == 1  # of this process
    after = lines(run, "Learning rate")
    assert [step for step, _ in after["lr-AdamW"]] == [1, 2, 3, 4, 5, 6]


# ---- numbers in words, and the colours of both themes --------------------------------


@given(st.floats(-1e6, 1e6))
def test_a_number_is_the_value_to_six_digits(value: float) -> None:
    assert float(number(value).replace(",", "")) == float(f"{value:.6g}")


def test_both_themes_have_every_colour() -> None:
    """In the dark one no colour is that of the light one."""
    style = Path(look.__file__).with_name("page.css").read_text()
    dark = dict(re.findall(r"--(\w+):(#\w{6})", style))
    assert dark.keys() == LIGHT.keys()
    assert not set(dark.items()) & set(LIGHT.items())
