"""The page is whole in itself, and says what the rows say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.report.runs import (
    WINDOW,
    charts,
    page_of,
    points,
    run_folder,
    titles,
)


def test_every_value_that_was_logged_can_be_pointed_at(tmp_path: Path) -> None:
    losses = [3.0, 2.0, 1.5]
    rows: list[dict[str, Any]] = [
        {"step": 10 * n, **WINDOW, "window/loss": loss} for n, loss in enumerate(losses)
    ]
    page = page_of(run_folder(tmp_path, [*rows, {"step": 20, "val/loss": 1.75}]))
    train, validation = charts(page)[0]["lines"]
    assert points(train) == [(0, 3.0), (10, 2.0), (20, 1.5)]
    assert points(validation) == [(20, 1.75)]
    assert len(charts(page)) == len(titles(page)) == page.count('class="plot"') == 8


def test_values_are_short_and_steps_are_whole(tmp_path: Path) -> None:
    rows = [
        {"step": 12_345_678, "val/loss": 1 / 3},
        {"step": 12_345_679, "val/loss": 1},
    ]
    (chart,) = charts(page_of(run_folder(tmp_path, rows)))
    assert points(chart["lines"][0]) == [(12_345_678, 0.333333), (12_345_679, 1)]


def test_it_needs_no_other_file_and_no_network(tmp_path: Path) -> None:
    page = page_of(run_folder(tmp_path, [{"step": 0, **WINDOW}]))
    assert "default-src 'none'" in page
    elsewhere = r"\b(src|href)=|url\(|@import|https?://(?!www.w3.org/2000/)"
    assert not re.search(elsewhere, page)


def test_names_are_no_markup(tmp_path: Path) -> None:
    name = "</script><img src=x onerror=alert(1)>&{0}"
    folder = run_folder(tmp_path / "<b>run", [{"step": 0, name: 1.0}])
    page = page_of(folder)
    assert "<img" not in page
    assert "<b>run" not in page
    assert page.count("</script>") == 2
    assert charts(page)[0]["lines"][0]["label"] == name


def test_each_chart_is_described_for_those_who_cannot_see_it(tmp_path: Path) -> None:
    rows = [{"step": n, "window/padding": share} for n, share in enumerate([0.5, 0.1])]
    page = page_of(run_folder(tmp_path, rows))
    plot = re.search('<div class="plot" id="(.*?)" (.*?)>', page)
    assert plot is not None
    assert 'role="group" tabindex="0" aria-label="Padding"' in plot[2]
    assert f'aria-describedby="{plot[1]}-says"' in plot[2]
    said = re.search(f'<p id="{plot[1]}-says" hidden>(.*?)</p>', page)
    assert said is not None
    assert said[1] == (
        "The share of tokens that only pad. window/padding: 50% at step 0, 10% at "
        "step 1, from 10% to 50%."
    )


def test_without_scripts_the_numbers_are_there_and_it_is_said(tmp_path: Path) -> None:
    rows = [{"step": n, "val/loss": 4.5 - n} for n in range(3)]
    page = page_of(run_folder(tmp_path, rows))
    without = re.sub("<script.*?</script>", "", page, flags=re.DOTALL)
    assert "The charts need scripts, which are switched off here" in without
    table = without.partition("<details>")[2].partition("</details>")[0]
    cells = re.findall(r"<t[hd].*?>([^<]*)</t[hd]>", table)
    assert cells[7:] == ["val/loss", "3", "4.5", "2.5", "2.5", "4.5", "0 to 2"]


def test_what_is_not_finite_leaves_a_gap_and_is_counted(tmp_path: Path) -> None:
    losses = [3.0, 2.0, "nan", "inf", 2.0, 1.0]
    rows = [{"step": n, "val/loss": loss} for n, loss in enumerate(losses)]
    page = page_of(run_folder(tmp_path, rows))
    (line,) = charts(page)[0]["lines"]
    assert line["values"] == [3, 2, None, None, 2, 1]
    assert line["alone"] == []
    assert "val/loss: 2 rows have no finite value: a gap." in page
    page = page_of(run_folder(tmp_path / "2", [rows[0], rows[1], rows[4]]))
    assert charts(page)[0]["lines"][0]["values"] == [3, 2, 2]  # the control
    assert "no finite value" not in page


def test_a_point_that_stands_alone_is_drawn(tmp_path: Path) -> None:
    values = [1, "nan", 2, 3, "nan", 4]
    rows = [{"step": n, "val/loss": value} for n, value in enumerate(values)]
    (line,) = charts(page_of(run_folder(tmp_path, rows)))[0]["lines"]
    assert line["alone"] == [0, 5]
    (line,) = charts(page_of(run_folder(tmp_path / "1", rows[:1])))[0]["lines"]
    assert line["alone"] == [0]


@pytest.mark.parametrize(
    ("column", "values", "known"),
    [
        ("window/loss", [0.1, 40.0], {"axes": ["log", "whole"], "fromZero": False}),
        ("window/loss", [-0.1, 40.0], {"axes": ["whole"]}),
        ("window/loss", [2.0, 2.0], {"axes": ["whole"]}),
        ("window/loss", [2.0, 4.0], {"axes": ["whole", "log"]}),
        ("window/weight", [0.1, 40.0], {"axes": ["whole"], "fromZero": True}),
        ("window/micro_batches", [1.0, 4.0], {"asStairs": True, "isShare": False}),
        ("window/padding", [0.1, 0.2], {"asStairs": False, "isShare": True}),
    ],
)
def test_the_script_is_told_what_axis_it_is(
    column: str, values: list[float], known: dict[str, bool], tmp_path: Path
) -> None:
    rows = [{"step": n, column: value} for n, value in enumerate(values)]
    (chart,) = charts(page_of(run_folder(tmp_path, rows)))
    assert chart.items() >= known.items()


def test_many_rows_make_a_page_of_bounded_size_with_the_extremes(
    tmp_path: Path,
) -> None:
    rows = [{"step": n, "window/loss": 1 + n % 7 / 10} for n in range(20_000)]
    rows[777]["window/loss"] = 9.5
    page = page_of(run_folder(tmp_path, rows))
    assert len(page) < 150_000
    assert "20,000 values, shown as the mean of each stretch" in page
    assert "to 9.5." in page
    (line,) = charts(page)[0]["lines"]
    assert line["steps"][0] == 0
    assert line["steps"][-1] == 19_999
    assert max(line["high"]) == 9.5  # the peak is there
    assert max(line["values"]) < 2  # and is not the mean's


def test_many_lines_of_many_rows_stay_below_a_megabyte(tmp_path: Path) -> None:
    names = [f"window/{n}/{key}" for n in range(12) for key in ("loss", "weight")]
    names += [f"lr-Adam/pg{n}" for n in range(40)]
    rows = [
        {"step": n, **{name: 1 + (n * 7919 % 104729) / 104729 for name in names}}
        for n in range(1500)
    ]
    page = page_of(run_folder(tmp_path, rows))
    assert sum(len(chart["lines"]) for chart in charts(page)) == len(names)
    assert len(page.encode()) < 1_000_000


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
