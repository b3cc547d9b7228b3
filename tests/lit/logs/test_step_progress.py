"""Progress in optimizer steps, with and without a terminal."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule

from tests.helpers import loader, quiet_lightning, trainer
from trainkit import (
    AccumulationCallback,
    AccumulationSchedule,
    PerSample,
    StepProgress,
    TrainkitError,
)
from trainkit.core.late_reading import LateReading


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return (self.net(batch) * 0 + 3).mean()  # always 3

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val/loss", 0.125, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.25)


def fit(
    *callbacks: Any,
    accumulate: int = 2,
    module: LightningModule | None = None,
    **options: Any,
) -> None:
    data = loader(list(torch.randn(16, 2)), 2, collate=torch.stack)
    with quiet_lightning():
        trainer(
            accumulate,
            callbacks=[AccumulationCallback(PerSample()), *callbacks],
            max_epochs=1,
            enable_progress_bar=True,
            num_sanity_val_steps=0,
            **options,
        ).fit(module or Net(), data, data)


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    said = capsys.readouterr().out.splitlines()
    return [
        line for line in said if line.startswith("trainkit | step ") and "of" in line
    ]


def test_without_a_terminal_it_says_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fit(StepProgress(every_n_steps=2))
    assert lines(capsys) == [
        "trainkit | step 2 of 4: loss 3",
        "trainkit | step 4 of 4: loss 3",
        "trainkit | step 4 of 4: loss 3, val/loss 0.125",
    ]


class Quiet(Net):
    """Shows nothing by itself."""

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        pass


def test_after_validation_the_loss_is_known_whatever_the_module_shows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fit(StepProgress(every_n_steps=50), module=Quiet())
    assert lines(capsys) == ["trainkit | step 4 of 4: loss 3"]


def test_the_first_number_of_a_line_is_waited_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LateReading, "arrived", False)  # as on a busy GPU
    fit(StepProgress(every_n_steps=2), module=Quiet())
    assert lines(capsys)[0] == "trainkit | step 2 of 4: loss 3"


class TwoOptimizers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [super().configure_optimizers(), super().configure_optimizers()]


def test_steps_of_all_optimizers_are_counted_as_max_steps_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    each = trainer(
        callbacks=[StepProgress(every_n_steps=3)],
        max_steps=10,
        enable_progress_bar=True,
        num_sanity_val_steps=0,
    )
    with quiet_lightning():
        data = loader(list(torch.randn(16, 2)), 2, collate=torch.stack)
        each.fit(TwoOptimizers(), data, data)
    assert each.global_step == 10
    assert [line.split(":")[0] for line in lines(capsys)] == [
        f"trainkit | step {step} of 10" for step in (4, 6, 10)
    ]


def test_an_end_that_epochs_set_is_not_known_in_steps_of_several_optimizers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Lightning reckons 8 steps in an epoch of 8 windows, and counts 16."""
    each = trainer(
        callbacks=[StepProgress(every_n_steps=8)],
        max_epochs=1,
        enable_progress_bar=True,
        limit_val_batches=0,
    )
    with quiet_lightning():
        data = loader(list(torch.randn(16, 2)), 2, collate=torch.stack)
        each.fit(TwoOptimizers(), data, data)
    assert each.global_step == 16
    said = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert said[-2:] == ["trainkit | step 8", "trainkit | step 16"]


def test_a_schedule_says_how_many_steps_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    schedule = AccumulationSchedule({0: 1, 4: 2}, unit="step")
    fit(schedule, StepProgress(every_n_steps=6), accumulate=1)
    assert lines(capsys)[0] == "trainkit | step 6 of 6: loss 3"


def test_on_a_terminal_it_draws_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    fit(StepProgress())
    drawn = terminal.getvalue()
    assert "4/4" in drawn
    assert "loss 3, val/loss 0.125" in drawn


def test_a_module_prints_above_it(capsys: pytest.CaptureFixture[str]) -> None:
    """`LightningModule.print` asks the bar whether it is enabled."""

    class Printing(Net):
        def on_train_start(self) -> None:
            self.print("a word [of its own]")

    with quiet_lightning():
        fit(StepProgress(), module=Printing())
    assert "a word [of its own]" in capsys.readouterr().out


def test_disabled_it_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    progress = StepProgress(every_n_steps=1)
    progress.disable()
    fit(progress)
    assert lines(capsys) == []


@pytest.mark.parametrize("wrong", [0, -1, 1.5])
def test_a_wrong_interval_is_refused(wrong: Any) -> None:
    with pytest.raises(TrainkitError, match=f"every_n_steps: .* received {wrong}"):
        StepProgress(every_n_steps=wrong)
