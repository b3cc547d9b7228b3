"""The page is whole in itself, and says what the rows say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.report.runs import (
    WINDOW,
    drawn,
    legends,
    page_of,
    run_folder,
    titles,
)
from trainkit.pages.look import DARK, LIGHT


def test_every_value_that_was_logged_is_drawn_and_the_last_is_named(
    tmp_path: Path,
) -> None:
    rows = [{"step": 10 * n, **WINDOW, "window/loss": 3 - n} for n in range(3)]
    page = page_of(run_folder(tmp_path, [*rows, {"step": 20, "val/loss": 1.75}]))
    assert legends(page)["Loss"] == {
        "window/loss": "1 at step 20",
        "val/loss": "1.75 at step 20",
    }
    assert page.count("<svg ") == len(titles(page)) + 1 == 9  # the loss is there twice
    train, validation = drawn(page, "Loss")
    ((left, top), (middle, half), (right, bottom)) = (
        train[0][n : n + 2] for n in (0, 2, 4)
    )
    assert middle == pytest.approx((left + right) / 2, abs=0.2)
    assert half == pytest.approx((top + bottom) / 2, abs=0.2)
    assert left < middle < right
    assert top < half < bottom
    x, y = validation[0][:2]
    assert x == right
    assert y == pytest.approx(bottom - 0.375 * (bottom - top), abs=0.2)


def test_a_thousand_values_are_all_drawn_and_more_are_a_mean_in_a_band(
    tmp_path: Path,
) -> None:
    values = [2 + n * 4 % 7 / 10 for n in range(20_000)]
    values[777] = 9.5
    for count in (1000, 20_000):
        rows = [{"step": n, "metric": value} for n, value in enumerate(values[:count])]
        page = page_of(run_folder(tmp_path, rows))
        (line,) = drawn(page, "metric")
        is_mean = "values are shown as the mean of each stretch" in page
        assert is_mean == (count > 1000)
        num_points = sum(len(piece) // 2 for piece in line)
        assert num_points <= 252 if is_mean else num_points > 800  # straight runs join
        assert "<td>9.5</td>" in page  # the peak is in the numbers
        assert len(page.encode()) < 100_000


def test_many_lines_of_many_rows_stay_below_a_megabyte(tmp_path: Path) -> None:
    names = [f"window/{n}/{key}" for n in range(12) for key in ("loss", "weight")]
    names += [f"lr-Adam/pg{n}" for n in range(40)]
    rows = [
        {"step": n, **{name: 1 + (n * 7919 % 104729) / 104729 for name in names}}
        for n in range(1500)
    ]
    page = page_of(run_folder(tmp_path, rows))
    assert sum(map(len, legends(page).values())) == len(names)
    assert len(page.encode()) < 1_000_000


def test_it_runs_nothing_and_needs_no_other_file_and_no_network(tmp_path: Path) -> None:
    page = page_of(run_folder(tmp_path, [{"step": 0, **WINDOW}]))
    assert "default-src 'none'; style-src 'unsafe-inline'\"" in page
    elsewhere = r"<script|\b(src|href)=\"(?!#)|url\((?!#)|@import|https?:|\bon\w+="
    assert not re.search(elsewhere, page)
    assert page.count('href="#') > 0  # the control: within an SVG


def test_names_are_no_markup(tmp_path: Path) -> None:
    name = "</svg><img src=x onerror=alert(1)>&{0}$x^$"
    page = page_of(run_folder(tmp_path / "<b>run", [{"step": 0, name: 1.0}]))
    assert "<img" not in page
    assert "<b>run" not in page
    assert list(legends(page)) == [name]
    assert list(legends(page)[name]) == [name]


def test_the_colours_are_those_of_the_readers_system(tmp_path: Path) -> None:
    """What is drawn names them, and they are defined twice."""
    rows = [{"step": n, **WINDOW, "val/loss": 1} for n in range(3)]
    page = page_of(run_folder(tmp_path, rows))
    light, dark = re.findall(r":root\{(.*?)\}", page)
    for colours, style in ((LIGHT, light), (DARK, dark)):
        assert all(f"--{name}:{value};" in style for name, value in colours.items())
    assert "@media screen and (prefers-color-scheme:dark){:root{" in page
    for svg in re.findall("<svg .*?</svg>", page):
        assert "var(--train)" in svg
        assert "var(--quiet)" in svg
        assert not re.search(r":\s*#", svg)  # no other colour


def test_two_charts_share_no_identifier(tmp_path: Path) -> None:
    rows = [{"step": n, **WINDOW} for n in range(3)]
    page = page_of(run_folder(tmp_path, rows))
    known = re.findall(r'\bid="(.*?)"', page)
    assert len(known) == len(set(known)) > 8
    used = re.findall(r"(?:url\(|href=\")#(\w+)", page)
    assert set(used) <= set(known)


def test_what_is_not_finite_leaves_a_gap_and_is_counted(tmp_path: Path) -> None:
    losses = [3.0, 2.0, "nan", "inf", 2.0, 1.0]
    rows = [{"step": n, "val/loss": loss} for n, loss in enumerate(losses)]
    page = page_of(run_folder(tmp_path, rows))
    (line,) = drawn(page, "Loss")
    assert [len(piece) for piece in line] == [4, 4]
    assert "val/loss: 2 rows have no finite value: a gap." in page
    page = page_of(run_folder(tmp_path / "2", [rows[0], rows[1], rows[4]]))
    assert [len(piece) for piece in drawn(page, "Loss")[0]] == [6]  # the control
    assert "no finite value" not in page


def test_the_lines_are_there_in_numbers(tmp_path: Path) -> None:
    rows = [{"step": n, "val/loss": 4.5 - n} for n in range(3)]
    page = page_of(run_folder(tmp_path, rows))
    table = page.partition("<details>")[2].partition("</details>")[0]
    cells = re.findall(r"<t[hd].*?>([^<]*)</t[hd]>", table)
    assert cells[7:] == ["val/loss", "3", "4.5", "2.5", "2.5", "4.5", "0 to 2"]


SUMMARY: dict[str, Any] = {
    "name": "small",
    "status": "finished",
    "steps": 4,
    "metrics": {"val/loss": 2.5, "lr-SGD": 0.1},
    "windows": {},
    "micro_batching": None,
    "learning_rates": [0.1],
    "plain_accumulation": {"mean": 0.058, "largest": 0.2},
    "effective_batch": {
        "micro_batch": 4,
        "accumulate": 4,
        "replicas": 2,
        "size": 32,
        "first_size": 32,
        "unit": "samples",
    },
    "versions": {"torch": "2.13.0"},
    "git_commit": None,
    "seconds": 10.6,
}


@pytest.mark.parametrize(
    ("last_step", "summary", "said"),
    [
        (3, SUMMARY, "finished after 4 optimizer steps"),
        (3, SUMMARY, "off by 5.8% of their size"),
        (3, SUMMARY, "per-device batch 4 x accumulation 4 x ranks 2 = 32 samples"),
        (9, SUMMARY, "resumed, up to step 9"),
        (3, None, "has not ended, or was killed; its last row is of step 3"),
        (3, {**SUMMARY, "effective_batch": None}, "finished after 4"),
    ],
)
def test_the_table_on_top_is_the_summary(
    last_step: int, summary: dict[str, Any] | None, said: str, tmp_path: Path
) -> None:
    folder = run_folder(tmp_path, [{"step": last_step, "val/loss": 2.5}])
    if summary is not None:
        (tmp_path / "summary.json").write_text(json.dumps(summary))
    page = page_of(folder)
    table = page.partition('<table class="summary">')[2].partition("</table>")[0]
    assert said in table
    assert ("resumed" in table) == (last_step == 9)


def test_plain_accumulation_and_the_gap_name_each_other(tmp_path: Path) -> None:
    said = ["the chart Uniform gap shows", "Plain accumulation gives equal weights."]
    for rows, count in (([{"window/uniform_gap": 0.1}], 1), ([{"val/loss": 1}], 0)):
        folder = run_folder(tmp_path, [{"step": 0, **rows[0]}])
        folder.write_summary(SUMMARY)
        page = page_of(folder)
        assert "off by 5.8% of their size" in page
        assert [page.count(each) for each in said] == [count, count]
