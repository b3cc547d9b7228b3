"""A run of `trainkit train` is evaluated with its own configuration and weights."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer

from tests.cli.evaluate.runs import files, result, trainkit
from tests.cli.ones_own import Data, Net
from tests.recipes.debugging import small


def validations(run: Path) -> dict[int, float]:
    """What the training's own validations have logged, after so many steps."""
    with (run / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["val/loss"]]
    return {int(row["step"]): float(row["val/loss"]) for row in rows}


def test_of_validation(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It finds the number that the training's own validation has logged at that step,
    and of other weights another one."""
    before = files(run)
    logged = validations(run)
    capsys.readouterr()
    assert trainkit("validate", run) == 0
    said = capsys.readouterr().out
    found = result(run, "validate")
    assert found["checkpoint"] == "checkpoints/best.ckpt"
    assert found["metrics"] == {"val/loss": logged[found["step"]]}
    assert found["metrics"]["val/loss"] == min(logged.values())
    assert f"validate: checkpoints/best.ckpt of step {found['step']}\n" in said
    assert "window" not in said
    assert "proof" not in said
    assert len(said.splitlines()) == 3
    last = run / "checkpoints" / "last.ckpt"
    assert trainkit("validate", last) == 0
    of_last = result(run, "validate")
    assert of_last["step"] == 20
    assert of_last["metrics"] == {"val/loss": logged[20]}
    assert of_last["metrics"] != found["metrics"]  # the control
    # The run stays as it was.
    after = files(run)
    assert after.keys() - before.keys() == {"validate.json"}
    assert {name: after[name] for name in before} == before
    (run / "validate.json").unlink()


def test_of_a_test_with_overrides(run: Path) -> None:
    assert trainkit("test", run) == 0
    found = result(run, "test")
    module = Net()
    best = torch.load(run / "checkpoints" / "best.ckpt")
    module.load_state_dict(best["state_dict"])
    alone = Trainer(logger=False, accelerator="cpu", enable_progress_bar=False)
    (wanted,) = alone.test(module, Data(), verbose=False)
    assert found["metrics"] == wanted
    assert trainkit("test", run, "+data.test_rows=5") == 0
    again = result(run, "test")
    assert again["overrides"] == ["+data.test_rows=5"]
    assert again["metrics"] != wanted


def test_log_exact_and_layers_that_a_guard_has_changed(tmp_path: Path) -> None:
    words = [*small("digits_bn", epochs=1), "batchnorm=group_norm", "report=false"]
    assert trainkit("train", *words, "name=run") == 0
    (run,) = (tmp_path / "outputs" / "run").iterdir()
    assert trainkit("validate", run) == 0
    found = result(run, "validate")
    assert found["metrics"]["val/loss"] == validations(run)[found["step"]]
