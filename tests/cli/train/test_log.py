"""`train.log` has what stood on the screen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipes.code_lm import CodeLM
from tests.cli.training import run_dirs, the_run, train


class Breaks(CodeLM):
    """Has a fault of its own in the second window."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 1:
            raise RuntimeError("my own fault")


BREAKS = f"model._target_={__name__}.Breaks"


@pytest.fixture(autouse=True)
def _allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINKIT_ALLOW", "tests")


def log_of(where: Path) -> list[str]:
    return (the_run(where) / "train.log").read_text().splitlines()


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    found = capsys.readouterr()
    return [*found.out.splitlines(), *found.err.splitlines()]


def test_it_has_all_lines_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train() == 0
    lines = log_of(tmp_path)
    assert sorted(lines) == sorted(shown(capsys))
    for text in ("step: per-device", "windows: ", "step 2 of 2: ", "written to: "):
        assert sum(f"trainkit | {text}" in line for line in lines) == 1


def test_a_resumed_run_appends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train() == 0
    first = log_of(tmp_path)
    where = f"ckpt_path={the_run(tmp_path)}/checkpoints/last.ckpt"
    capsys.readouterr()
    assert train(where, "trainer.max_steps=3", small=[]) == 0
    whole = log_of(tmp_path)
    assert whole[: len(first)] == first
    assert sorted(whole[len(first) :]) == sorted(shown(capsys))
    assert train(where, "trainer.max_steps=3", small=[]) == 0  # nothing is left to do
    assert log_of(tmp_path) == whole


@pytest.mark.parametrize("debugs", [False, True])
def test_a_fault_stands_in_it(
    debugs: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if debugs:
        monkeypatch.setenv("TRAINKIT_TRACEBACK", "1")
    assert train(BREAKS) == 1
    lines = log_of(tmp_path)
    assert lines[-1] == "RuntimeError: my own fault"
    assert lines[-1] == shown(capsys)[-1]
    assert lines.count("RuntimeError: my own fault") == 1


def test_a_mistake_that_shows_while_training_stands_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = "+callbacks.stop={_target_: lightning.pytorch.callbacks.EarlyStopping,"
    assert train(f"{wrong} monitor: nope, check_on_train_epoch_end: false}}") != 0
    assert "nope" in log_of(tmp_path)[-1]


def test_a_mistake_before_training_leaves_no_log(tmp_path: Path) -> None:
    assert train("model.width=3") == 2
    assert not run_dirs(tmp_path)
    assert not list(tmp_path.rglob("train.log"))


def test_each_run_of_several_has_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("-m", "trainer.max_steps=1,2") == 0
    for steps, run in enumerate(run_dirs(tmp_path), 1):
        lines = (run / "train.log").read_text().splitlines()
        assert sum("trainkit | training: " in line for line in lines) == 1
        assert any(f"step {steps} of {steps}: " in line for line in lines)
        assert not any("all runs" in line for line in lines)
