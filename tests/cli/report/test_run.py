"""What a run's folder tells, and that `trainkit train` leaves its report."""

from __future__ import annotations

import json
import re
import sys
from html import unescape
from pathlib import Path

import pytest

from tests.cli.report.runs import SUMMARY, charts_of, page_of, run_folder, titles
from tests.cli.training import summary_of, the_run, train
from trainkit.cli.main import main
from trainkit.cli.report.run import STEP_TIMES, rates, read_step_times, throughput
from trainkit.cli.runs.folder import RunFolder
from trainkit.cli.runs.summary_rows import rows, throughput_text

HEAD = "step,seconds,waiting,samples,tokens,padding\n"
TIMES = "1,nan,nan,4,60,40\n2,0.5,0.1,8,90,10\n3,0.25,0.05,4,60,0\n4,1.25,0,8,50,50\n"


def times(path: Path, text: str = HEAD + TIMES) -> Path:
    file = path / "step_times.csv"
    file.write_text(text)
    return file


def test_it_is_what_was_counted_over_the_time(tmp_path: Path) -> None:
    known = read_step_times(times(tmp_path))
    assert throughput(known) == {
        "steps": 3,
        "seconds": 2.0,
        "steps_per_second": 1.5,
        "samples_per_second": 10,
        "tokens_per_second": 100,
        "padding": pytest.approx(60 / 260),
        "waiting": pytest.approx(0.15 / 2),
    }
    tokens, samples = rates(known).values()
    assert samples.shown == [(2, 16), (3, 16), (4, 6.4)]
    assert tokens.shown == [(2, 180), (3, 240), (4, 40)]


def test_the_table_the_chart_and_the_summary_agree(tmp_path: Path) -> None:
    """By the seconds of each step the mean of the chart is the number of the table."""
    folder = run_folder(tmp_path, [{"step": 4, "window/loss": 1, "window/weight": 9}])
    known = read_step_times(times(tmp_path))
    speed = {"throughput": throughput(known)}
    said = "10 samples/s, 100 tokens/s, 23% padding, 8% of the time waiting for data"
    assert said in page_of(folder)  # as of a run that was killed
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY | speed))
    assert said in page_of(folder)
    assert rows(SUMMARY | speed)[-1] == ("throughput", said)
    assert rows(SUMMARY | {"throughput": None}) == rows(SUMMARY)
    seconds = dict(zip(known["step"], known["seconds"], strict=True))
    for counted in ("samples", "tokens"):
        (line,) = charts_of(folder)[f"Throughput, in {counted} per second"].lines
        mean = sum(rate * seconds[step] for step, rate in line.shown) / 2.0
        assert f"{mean:.0f} {counted}/s" in said


def test_weights_are_not_called_tokens(tmp_path: Path) -> None:
    """The control: what the strategy weighs is not what was counted."""
    seen = [{"step": n, "window/seen": 4 * n, "window/loss": 1} for n in range(1, 5)]
    folder = run_folder(tmp_path, seen)
    (tmp_path / "summary.json").write_text(json.dumps({**SUMMARY, "unit": "tokens"}))
    times(tmp_path, HEAD + re.sub(r"(\d+),(\d+)\n", "0,0\n", TIMES))
    assert titles(page_of(folder)) == ["Loss", "Throughput, in samples per second"]


@pytest.mark.parametrize(
    ("text", "steps", "said"),
    [
        ("", [], None),  # there is no such file
        (HEAD + "1,nan,nan,4,60,40\n", [], None),
        # a process began at step 3
        (HEAD + TIMES + "3,nan,nan,4,60,0\n", [2, 4], "9.14 samples/s, 80 tokens/s, 3"),
        (HEAD + TIMES + "4,0,0,8,50,50\n", [2, 3], "16 samples/s, 200 tokens/s"),
        # killed while writing, after step 4 was done again
        (HEAD + TIMES + "4,0.5,0,8,50,50\n5,0.", [2, 3, 4], "16 samples/s, 160 tokens"),
        ("step,seconds\n1,nan\n2,0.5\n", [], "2 steps/s"),  # of an earlier version
    ],
)
def test_what_is_not_known_is_left_out(
    text: str, steps: list[int], said: str | None, tmp_path: Path
) -> None:
    known = read_step_times(times(tmp_path, text) if text else tmp_path / "none")
    lines = rates(known)
    assert (lines["samples per second"].steps if lines else []) == steps
    measured = throughput(known)
    assert (measured is None) == (said is None)
    assert measured is None or throughput_text(**measured).startswith(said or "")


def test_numbers_have_three_digits() -> None:
    assert throughput_text(1.5, 1238.4, 38149.0, 0.124, 0.03) == (
        "1,240 samples/s, 38,100 tokens/s, 12% padding, 3% of the time waiting for data"
    )


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
    assert titles(page)[:10] == [
        "Loss",
        "Window weight, in tokens",
        "Throughput, in tokens per second",
        "Throughput, in samples per second",
        "Imbalance",
        "Learning rate",
        "Accumulation",
        "Gradient norm",
        "Padding",
        "Uniform gap",
    ]
    assert set(lines(run, "Loss")) == {"window/loss", "val/loss"}
    windows = lines(run, "Accumulation")["window/micro_batches"]
    assert [value for _, value in windows] == [1, 1, 4, 4]
    assert "finished after 4 optimizer steps" in page
    rates = lines(run, "Throughput, in tokens per second")["tokens per second"]
    assert len(rates) < 4  # the time before the first step is not known
    speed = summary_of(run)["throughput"]
    assert throughput_text(**speed) in unescape(page)
    times = read_step_times(run / STEP_TIMES)
    seconds = dict(zip(times["step"], times["seconds"], strict=True))
    mean = sum(rate * seconds[step] for step, rate in rates) / speed["seconds"]
    assert mean == pytest.approx(speed["tokens_per_second"])
    assert speed["seconds"] == pytest.approx(sum(seconds[step] for step, _ in rates))
    assert rates[-1][1] > 0
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
    assert summary_of(run)["throughput"]["steps"] == 3 + 1  # of both processes
    after = lines(run, "Learning rate")
    assert [step for step, _ in after["lr-AdamW"]] == [1, 2, 3, 4, 5, 6]
