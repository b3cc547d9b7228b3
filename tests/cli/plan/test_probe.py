"""`trainkit plan --probe` tries sizes on what `trainkit train` would train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from trainkit.recipes.code_lm import CodeLM  # type: ignore[import-not-found]

from tests.cli.plan.test_main import report
from tests.cli.training import SMALL, the_run, train
from trainkit.cli.plan import main
from trainkit.errors import TrainkitError

PROBE = ["--probe", "--target", "16", *SMALL]


@pytest.fixture(autouse=True)
def _somewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a folder of its own."""
    monkeypatch.chdir(tmp_path)


def test_what_it_finds_is_a_plan_with_the_sizes_tried(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = report(capsys, *PROBE)
    sizes = (found["micro_batch"], found["accumulate"], found["effective"])
    assert sizes == (16, 1, 16)
    assert [trial["size"] for trial in found["trials"]] == [2, 4, 8, 16]
    assert set(found["trials"][0]) == {"size", "fits", "peak_bytes"}
    words = [word for word in PROBE if word in SMALL and "batch_size" not in word]
    assert found["overrides"]["train"] == [
        *words,
        "data.batch_size=16",
        "trainer.accumulate_grad_batches=1",
    ]
    assert list(tmp_path.iterdir()) == [], "a plan writes nothing"


def test_its_overrides_train(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = report(capsys, *PROBE, "--max-micro-batch", "4")
    assert (found["micro_batch"], found["accumulate"]) == (4, 4)
    assert train(*found["overrides"]["train"], small=[]) == 0
    summary = json.loads((the_run(tmp_path) / "summary.json").read_text())
    assert summary["steps"] == 2


def test_lines_show_sizes_and_plan(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = CodeLM.training_step

    def limited(self: Any, batch: Any, *args: Any) -> Any:
        if len(batch["labels"]) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return step(self, batch, *args)

    monkeypatch.setattr(CodeLM, "training_step", limited)
    assert main([*PROBE, "--lr", "0.1", "--reference", "8", "--rule", "sqrt"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "trainkit | micro-batch 8: does not fit" in lines
    assert "trainkit | micro-batch: 4 samples on each rank" in lines
    assert any("lr, sqrt: 0.141421" in line for line in lines)
    assert any(
        "data.batch_size=4 trainer.accumulate_grad_batches=4" in s for s in lines
    )


def test_a_configuration_of_ones_own_is_found(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "my conf" / "experiment"
    folder.mkdir(parents=True)
    folder.joinpath("mine.yaml").write_text(
        "# @package _global_\ndefaults: [demo]\ndata:\n  batch_size: 8\n"
    )
    words = [word for word in PROBE[3:] if not word.startswith("data.batch_size")]
    more = ["experiment=mine", "--target", "16", "--max-micro-batch", "8"]
    argv = [*words, "--probe", "-cd", "my conf", *more]  # anywhere in the line
    assert [trial["size"] for trial in report(capsys, *argv)["trials"]] == [8]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([*PROBE, "--world-size", "2"], "--world-size: --probe takes the ranks of"),
        (["--probe", "seed=1"], "are required: --target"),
        ([*PROBE, "--targe", "8"], "unrecognized arguments: --targe"),
        ([*PROBE, "--max-micro-batch", "0"], "max_micro_batch.*must be a whole number"),
        ([*PROBE, "schedule=ramp"], "AccumulationSchedule changes accumulate_grad"),
    ],
)
def test_a_mistake_is_refused_by_name(argv: list[str], message: str) -> None:
    with pytest.raises(TrainkitError, match=message):
        main(argv)
