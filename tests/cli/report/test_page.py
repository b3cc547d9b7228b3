"""The page is whole in itself, and says what the rows say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.report.runs import (
    WINDOW,
    drawings,
    page_of,
    points,
    run_folder,
    titles,
)
from trainkit.cli.runs.folder import RunFolder


def test_every_value_that_was_logged_can_be_pointed_at(tmp_path: Path) -> None:
    losses = [3.0, 2.0, 1.5]
    rows: list[dict[str, Any]] = [
        {"step": 10 * n, **WINDOW, "window/loss": loss} for n, loss in enumerate(losses)
    ]
    page = page_of(run_folder(tmp_path, [*rows, {"step": 20, "val/loss": 1.75}]))
    train, validation = points(page)["chart0"]
    assert [(step, text) for _, _, step, text in train["at"]] == [
        (0, "3"),
        (10, "2"),
        (20, "1.5"),
    ]
    assert [(step, text) for _, _, step, text in validation["at"]] == [(20, "1.75")]
    xs, ys = ([point[i] for point in train["at"]] for i in (0, 1))
    assert xs == sorted(xs)
    assert ys == sorted(ys)  # downwards, as the loss goes
    assert len(drawings(page)) == len(titles(page)) == 8


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
    assert points(page)["chart0"][0]["label"] == name
    assert drawings(page)  # well-formed


def test_each_chart_is_described_for_those_who_cannot_see_it(tmp_path: Path) -> None:
    rows = [{"step": n, "window/padding": share} for n, share in enumerate([0.5, 0.1])]
    (svg,) = drawings(page_of(run_folder(tmp_path, rows)))
    assert svg.get("role") == "img"
    assert [child.text for child in svg[:2]] == [
        "Padding",
        "The share of tokens that only pad. window/padding: 50% at step 0, 10% at "
        "step 1, from 10% to 50%.",
    ]


def stretches(folder: RunFolder) -> int:
    (svg,) = drawings(page_of(folder))
    lines = [path for path in svg.iter("path") if "line" in path.get("class", "")]
    return sum(path.get("d", "").count("M") for path in lines)


def test_what_is_not_finite_leaves_a_gap_and_is_counted(tmp_path: Path) -> None:
    losses = [3.0, 2.0, "nan", "inf", 2.0, 1.0]
    rows = [{"step": n, "val/loss": loss} for n, loss in enumerate(losses)]
    folder = run_folder(tmp_path, rows)
    assert stretches(folder) == 2
    assert "val/loss: 2 rows have no finite value: a gap." in page_of(folder)
    whole = run_folder(tmp_path / "2", [rows[0], rows[1], rows[4]])
    assert stretches(whole) == 1  # the control
    assert "a gap" not in page_of(whole)


def test_a_point_that_stands_alone_is_drawn(tmp_path: Path) -> None:
    (svg,) = drawings(page_of(run_folder(tmp_path, [{"step": 0, "val/loss": 2.0}])))
    assert len(list(svg.iter("circle"))) == 1
    assert [text.text for text in svg.iter("text") if text.get("class") == "x"] == ["0"]


def test_many_rows_make_a_page_of_bounded_size_with_the_extremes(
    tmp_path: Path,
) -> None:
    rows = [{"step": n, "window/loss": 1 + n % 7 / 10} for n in range(20_000)]
    rows[777]["window/loss"] = 9.5
    page = page_of(run_folder(tmp_path, rows))
    assert len(page) < 150_000
    assert "20,000 values, shown as the mean of each stretch" in page
    assert "to 9.5." in page
    (svg,) = drawings(page)
    highest, of_means = (
        min(
            float(place.split()[1])
            for path in svg.iter("path")
            if path.get("class") == style
            for place in re.split("[ML]", path.get("d", ""))[1:]
        )
        for style in ("line train band", "line train")
    )
    assert highest < of_means - 50  # the peak is there, and is not the mean's


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
        (9, SUMMARY, "has gone on, up to step 9"),
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
    assert ("gone on" in table) == (last_step == 9)
