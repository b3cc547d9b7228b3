"""The table before training: once, in order, above every bar; on the first rank alone,
which `tests/lit/windows/test_ranks.py` shows."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from tests.helpers import trainer
from tests.lit.fronts import micro_batches
from tests.lit.schedule.scheduling import SEQUENCES, batches, fitted, make
from tests.zoo.callbacks import Terminal
from trainkit import AccumulationSchedule, BatchNormGuard, StepProgress
from trainkit.lit.callback.table import show

STEP = "trainkit | step: per-device batch"
BY = "weighed by PerToken"


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


@pytest.mark.filterwarnings("ignore:accumulate_grad_batches=12. the epoch has only 10")
@pytest.mark.parametrize(
    ("schedules", "how", "expected"),
    [
        (  # the sizes of windows, then the step
            lambda: [AccumulationSchedule({0: 4, 3: 3, 5: 1})],
            {"loader": batches(4), "max_epochs": 2},
            [
                "trainkit | accumulation: 4 from epoch 0 on, 3 from epoch 3 on, "
                "1 from epoch 5 on: 6 steps in all",
                f"{STEP} 4 x accumulation 4 x ranks 1 = 16 samples a step, {BY}",
            ],
        ),
        (
            lambda: [AccumulationSchedule.ramp(start=1, end=16, over=15_000)],
            {},
            [
                "trainkit | accumulation: 1 from step 0 on, 2 from step 1,000 on, "
                "3 from step 2,000 on, ..., 16 from step 15,000 on: 10 steps in all"
            ],
        ),
        (
            list,
            {"accumulate": 5},
            [
                f"{STEP} not known x accumulation 5 x ranks 1, {BY}",
                "trainkit | windows: 2 full windows an epoch",
            ],
        ),
        (  # no window ever fills (pytorch-lightning#21808, pet#25, speculators#859)
            list,
            {"loader": batches(4), "accumulate": 12},
            [
                f"{STEP} 4 x accumulation 10 x ranks 1 = 40 samples a step, {BY}",
                "trainkit | windows: 0 full windows + 1 short one (10 of 12 "
                "micro-batches) an epoch",
            ],
        ),
    ],
)
def test_plan_is_printed_once_in_order(
    schedules: Any, how: Any, expected: list[str], capsys: Any
) -> None:
    """By each fit."""
    for _ in range(2):
        fitted("callback", *schedules(), **{"max_epochs": 1, **how})
        found = lines(capsys)
        assert found[: len(expected)] == expected
        assert sum(STEP in line for line in found) == 1


def test_a_terminal_gets_the_same_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brackets are no markup, and the terminal itself wraps what is long."""
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    monkeypatch.setenv("COLUMNS", "60")
    text = "[0.1] -> [0.2] [bold]" + " word" * 20
    show([("lr", text), ("epoch", "97 windows")])
    lines = [f"trainkit | lr: {text}", "trainkit | epoch: 97 windows"]
    assert terminal.getvalue().splitlines() == lines


def test_nothing_is_shown_without_rows_or_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As under pythonw, where print() writes nowhere as well."""
    show([])
    assert lines(capsys) == []
    monkeypatch.setattr(sys, "stdout", None)
    show([("step", "64 samples")])


@pytest.mark.parametrize(
    ("bar", "checks", "guard"),
    [
        (StepProgress, 1, []),
        (RichProgressBar, 0, [BatchNormGuard()]),
        (TQDMProgressBar, 0, []),
        (TQDMProgressBar, 1, [BatchNormGuard()]),
    ],
)
def test_plan_is_printed_once_beside_every_bar(
    bar: Any, checks: int, guard: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the bar of tqdm is drawn, and after it has closed that of the sanity
    check, its own `print` writes nothing. With the guard the table is printed late."""
    module, ours = make("callback")
    module.validation_step = lambda batch, batch_idx: None
    data = micro_batches(SEQUENCES)
    how: dict[str, Any] = {"num_sanity_val_steps": checks, "enable_progress_bar": True}
    for _ in range(2):
        callbacks = [*ours, *guard, bar()]
        trainer(2, callbacks=callbacks, max_epochs=1, **how).fit(module, data, data)
        assert capsys.readouterr().out.count(STEP) == 1
