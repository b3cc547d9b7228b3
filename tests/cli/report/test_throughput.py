"""The throughput is what was seen, divided by the time of all steps."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.cli.report.runs import charts, page_of, run_folder, titles
from trainkit.cli.report.series import Series
from trainkit.cli.report.throughput import read_step_times, throughput
from trainkit.errors import TrainkitError

TIMES = {0.0: math.nan, 1.0: 0.5, 2.0: 0.25, 3.0: 0.25}
SEEN = {"window/seen": [100, 300, 400, 450], "window/samples_seen": [4, 8, 12, 16]}


def columns(*, start: str = "window/", every: int = 1) -> dict[str, Series]:
    steps = tuple(map(float, range(4)))[::every]
    return {
        name.replace("window/", start): Series(name, steps, tuple(values[::every]))
        for name, values in SEEN.items()
    }


def rates(found: list[Series]) -> dict[str, list[tuple[float, float]]]:
    return {each.name: each.shown for each in found}


def test_it_is_what_was_seen_over_the_time() -> None:
    assert rates(throughput(columns(), TIMES, "tokens")) == {
        "samples per second": [(1, 8), (2, 16), (3, 16)],
        "tokens per second": [(1, 400), (2, 400), (3, 200)],
    }


def test_windows_that_were_not_logged_count() -> None:
    found = rates(throughput(columns(every=2), TIMES, "tokens"))
    assert found["samples per second"] == [(2, 8 / 0.75)]


def test_only_tokens_are_called_tokens() -> None:
    found = throughput(columns(), TIMES, "micro-batches")
    assert [each.name for each in found] == ["samples per second"]


def test_of_several_optimizers_the_first_one_counts() -> None:
    assert rates(throughput(columns(start="window/0/"), TIMES, "")) == {
        "samples per second": [(1, 8), (2, 16), (3, 16)]
    }
    assert throughput(columns(start="window/1/"), TIMES, "tokens") == []


@pytest.mark.parametrize(
    ("times", "steps"),
    [
        ({}, []),  # an old run
        ({**TIMES, 2.0: math.nan}, [1, 3]),  # a process began here
        ({1.0: 0.5, 3.0: 0.25}, [1, 3]),  # killed before it was written
    ],
)
def test_an_unknown_time_is_a_gap(times: dict[float, float], steps: list[int]) -> None:
    found = throughput(columns(), times, "")
    assert [step for each in found for step, _ in each.shown] == steps


def test_of_a_step_that_was_done_again_the_later_time_counts(tmp_path: Path) -> None:
    file = tmp_path / "step_times.csv"
    file.write_text("step,seconds\n0,nan\n1,0.5\n2,9\n1,nan\n2,0.25\n3,0.")
    times = read_step_times(file)
    assert math.isnan(times[1])
    assert times[2] == 0.25
    assert 3 not in times


@pytest.mark.parametrize("text", ["step,seconds\n1,x\n", "step,time\n1,2\n"])
def test_a_damaged_file_is_named(text: str, tmp_path: Path) -> None:
    folder = run_folder(tmp_path, [{"step": 0, "val/loss": 2.0}])
    (tmp_path / "step_times.csv").write_text(text)
    with pytest.raises(TrainkitError, match="step_times.csv: must be a table of num"):
        page_of(folder)


def test_a_page_without_times_has_no_such_chart(tmp_path: Path) -> None:
    rows = [{"step": n, "window/samples_seen": n} for n in range(3)]
    folder = run_folder(tmp_path, [{**row, "window/loss": 1} for row in rows])
    assert titles(page_of(folder)) == ["Loss"]
    (tmp_path / "step_times.csv").write_text("step,seconds\n1,0.5\n2,0.25\n")
    page = page_of(folder)
    assert titles(page)[1:] == ["Throughput, in samples per second"]
    assert charts(page)[1]["lines"][0]["values"] == [2, 4]
