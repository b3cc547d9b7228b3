"""`trainkit train` leaves a report."""

from __future__ import annotations

import sys
from html import unescape
from pathlib import Path

import pytest

from tests.cli.report.runs import charts_of, titles
from tests.cli.training import summary_of, the_run, train
from trainkit.cli.main import main
from trainkit.cli.report.run import STEP_TIMES, read_step_times
from trainkit.cli.runs.folder import RunFolder
from trainkit.cli.runs.summary_rows import throughput_text


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
