"""What a run says of its noise scale: in `summary.json`, the table and the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.training import summary_of, the_run
from tests.cli.training import train as train_plainly
from trainkit.cli.main import main
from trainkit.core.noise.estimate import NoiseEstimate
from trainkit.core.noise.from_run import read_noise_scale
from trainkit.errors import TrainkitError

STEPS = [
    "trainer.max_steps=6",
    "trainer.accumulate_grad_batches=4",
    "data.batch_size=2",
]


def given(**values: Any) -> str:
    pairs = "".join(f", {name}: {value}" for name, value in values.items())
    return f"+callbacks.noise={{_target_: tests.cli.train.fake_noise.Given{pairs}}}"


def train(*words: str, **options: Any) -> int:
    """Train without the callback that the default configuration has."""
    return train_plainly("~callbacks.noise_scale", *words, **options)


def lines_of(out: str, label: str) -> list[str]:
    start = f"trainkit | {label}"
    return [line.removeprefix(start) for line in out.splitlines() if start in line]


def test_the_lines_are_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(given(samples=10), *STEPS) == 0
    out = capsys.readouterr().out
    run = the_run(tmp_path)
    facts = summary_of(run)
    assert NoiseEstimate.of_facts(facts["noise_scale"]) == read_noise_scale(run)
    assert facts["noise_scale"]["num_windows"] == 60
    assert [label for label, _ in facts["advice"]] == ["noise scale", "window of 8"]
    page = (run / "report.html").read_text()
    for label, text in facts["advice"]:
        assert f"trainkit | {label}: {text}" in out
        assert label in page
    assert "10 samples (7.69 to 13, 90 %), 1,000 tokens (769 to 1,300, 90 %)" in page
    (run / "report.html").unlink()  # drawn again, it has them too
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "near the noise scale, so keep it: twice as large takes" in page


def test_a_run_without_it_says_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("trainer.max_steps=1") == 0
    facts = summary_of(the_run(tmp_path))
    assert (facts["noise_scale"], facts["advice"]) == (None, [])
    assert not lines_of(capsys.readouterr().out, "noise scale")


def test_what_could_not_measure_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    why = "a window has one micro-batch"
    assert train(given(why_not=f"'{why}'"), "trainer.max_steps=1") == 0
    facts = summary_of(the_run(tmp_path))
    assert facts["noise_scale"] is None
    assert facts["advice"] == [["noise scale", f"not measured: {why}"]]
    out = capsys.readouterr().out
    said = f": not measured: {why}"
    assert lines_of(out, "noise scale") == [said]  # before training, and not again
    assert out.index(said) < out.index("training: finished")
    assert why in (the_run(tmp_path) / "report.html").read_text()
    with pytest.raises(TrainkitError, match=f"not measured: {why}"):
        read_noise_scale(the_run(tmp_path))


def test_too_few_windows_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(given(), "trainer.max_steps=1") == 0
    (line,) = summary_of(the_run(tmp_path))["advice"]
    assert line == ["noise scale", "no estimate: it takes 50 steps or more"]
    assert "trainkit | noise scale: no estimate: it takes" in capsys.readouterr().out


def test_at_least_is_null_in_the_file(tmp_path: Path) -> None:
    assert train(given(samples=50, bounded="false"), *STEPS) == 0
    facts = summary_of(the_run(tmp_path))
    assert facts["noise_scale"]["high"] is None
    assert facts["advice"][0][1].startswith("at least 38.5 samples")
    with pytest.raises(TrainkitError, match=r"at least 38.5 samples"):
        read_noise_scale(the_run(tmp_path))


def test_a_resumed_run_continues_the_estimate(tmp_path: Path) -> None:
    assert train(given(samples=10), *STEPS, "trainer.max_steps=3") == 0
    assert summary_of(the_run(tmp_path))["noise_scale"]["num_windows"] == 30
    assert train("ckpt_path=last", "trainer.max_steps=6", small=[]) == 0
    assert summary_of(the_run(tmp_path))["noise_scale"]["num_windows"] == 60
