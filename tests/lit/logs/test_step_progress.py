"""Progress in optimizer steps, with and without a terminal."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from tests.helpers import loader, quiet_lightning, trainer
from trainkit import (
    AccumulationCallback,
    AccumulationSchedule,
    BatchNormGuard,
    PerSample,
    StepProgress,
    TrainkitError,
)
from trainkit.core.checks import LateReading
from trainkit.lit.callback.base import Stopped
from trainkit.lit.logs import step_progress
from trainkit.lit.logs.step_bar import StepBar


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
        "trainkit | step 2 of 4: window/loss 3",
        "trainkit | step 4 of 4: window/loss 3",
        "trainkit | step 4 of 4: val/loss 0.125",  # its loss stands above
    ]


class Quiet(Net):
    """Shows nothing by itself."""

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        pass


def test_after_validation_the_loss_is_known_whatever_the_module_shows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fit(StepProgress(every_n_steps=50), module=Quiet())
    assert lines(capsys) == ["trainkit | step 4 of 4: window/loss 3"]


class Logging(Net):
    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log_dict({"val/loss": 0.125, "val/other": 0.5})  # not for the bar


@pytest.mark.parametrize("watching", [ModelCheckpoint, EarlyStopping])
def test_what_is_monitored_is_shown_after_validation(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, watching: Any
) -> None:
    callback = watching(monitor="val/loss")
    saves = watching is ModelCheckpoint
    options = {"enable_checkpointing": saves, "default_root_dir": tmp_path}
    fit(StepProgress(), callback, module=Logging(), **options)
    assert lines(capsys) == ["trainkit | step 4 of 4: window/loss 3, val/loss 0.125"]
    fit(StepProgress(), module=Logging())  # nothing monitors it
    assert lines(capsys) == ["trainkit | step 4 of 4: window/loss 3"]


def test_a_validation_without_numbers_has_no_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def lines_of(module: LightningModule) -> list[str]:
        data = loader(list(torch.randn(16, 2)), 2, collate=torch.stack)
        with quiet_lightning():
            trainer(
                2, callbacks=[StepProgress()], max_epochs=1, enable_progress_bar=True
            ).fit(module, data, data)
        return lines(capsys)

    assert lines_of(Quiet()) == []
    assert lines_of(Net()) == ["trainkit | step 4 of 4: val/loss 0.125"]


class Counting(Quiet):
    """Its loss is the number of the batch, and it shows each."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = (self.net(batch) * 0 + batch_idx).mean()
        self.log("train/loss", loss, prog_bar=True)
        return loss


LOSSES = [0.5, 2.5, 4.5, 6.5]  # of windows of 2


def test_a_line_has_the_numbers_of_its_own_step(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where they arrive late, as from a busy GPU."""
    expected = [
        f"trainkit | step {n} of 4: window/loss {loss:g}, train/loss {loss + 0.5:g}"
        for n, loss in enumerate(LOSSES, 1)
    ]
    for arrived in (True, False):
        monkeypatch.setattr(LateReading, "arrived", arrived)
        fit(StepProgress(every_n_steps=1), module=Counting())
        assert lines(capsys) == expected


class Validated(Counting):
    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val/loss", float(self.global_step), prog_bar=True)


def test_no_line_repeats_an_earlier_number(capsys: pytest.CaptureFixture[str]) -> None:
    fit(StepProgress(every_n_steps=1), module=Validated(), val_check_interval=4)
    assert [line.partition(": ")[2] for line in lines(capsys)] == [
        "window/loss 0.5, train/loss 1",
        "window/loss 2.5, train/loss 3",
        "val/loss 2",
        "window/loss 4.5, train/loss 5",  # without the validation of step 2
        "window/loss 6.5, train/loss 7",
        "val/loss 4",
    ]


def test_a_validation_between_two_lines_has_one_of_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fit(StepProgress(), module=Validated(), val_check_interval=4)
    assert lines(capsys) == [
        "trainkit | step 2 of 4: window/loss 2.5, val/loss 2",
        "trainkit | step 4 of 4: window/loss 6.5, val/loss 4",
    ]


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
    assert lines(capsys)[0] == "trainkit | step 6 of 6: window/loss 3"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn(
    monkeypatch: pytest.MonkeyPatch, columns: int, module: LightningModule
) -> list[str]:
    """The lines that stand on a terminal at the end, without escape sequences."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(step_progress, "_SECONDS_BETWEEN_UPDATES", 0)
    fit(StepProgress(), module=module, val_check_interval=4)
    last = re.split(r"\r\x1b\[2K(?:\x1b\[1A\x1b\[2K)*", terminal.getvalue())[-1]
    return re.sub(r"\x1b\[[0-9;?]*\w", "", last).rstrip("\n").split("\n")


def test_on_a_terminal_it_draws_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = drawn(monkeypatch, 120, Validated())
    assert line.startswith("step")
    assert " 4/4 window/loss 6.5, val/loss 4 0:00:" in line


class Wordy(Validated):
    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        for name in ("val/first_of_them", "val/second_of_them", "val/third_of_them"):
            self.log(name, float(self.global_step), prog_bar=True)


def test_on_a_narrow_terminal_no_number_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = drawn(monkeypatch, 80, Wordy())
    assert len(shown) > 1
    assert [line for line in shown if len(line) > 80] == []
    text = "\n".join(shown)
    for part in ("window/loss", " 6.5, ", "val/first_of_them", "val/third_of_them"):
        assert part in text
    assert "0:00:0" in text
    assert "…" not in text


@pytest.mark.parametrize("columns", [60, 70, 79, 80])
def test_a_number_wider_than_its_place_goes_on_below(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    """Cut, the step 195 would read as 19."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    bar = StepBar(780)
    bar.draw(247, ["window/loss 0.008396", "val/loss 0.009641 at step 195"])
    bar.close()
    last = re.split(r"\r\x1b\[2K(?:\x1b\[1A\x1b\[2K)*", terminal.getvalue())[-1]
    shown = re.sub(r"\x1b\[[0-9;?]*\w", "", last)
    assert max(map(len, shown.splitlines())) <= columns
    for word in ("0.008396", "val/loss", "0.009641", "195"):
        assert re.search(rf"(?<!\S){word}(?![\w.])", shown), shown


def test_in_the_bar_an_earlier_validation_has_its_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bars: list[list[str]] = []
    keep = StepBar.draw
    monkeypatch.setattr(
        StepBar,
        "draw",
        lambda self, n, texts: (bars.append(texts), keep(self, n, texts)),
    )
    drawn(monkeypatch, 120, Validated())
    assert ["window/loss 2.5", "val/loss 2"] in bars
    assert ["window/loss 4.5", "train/loss 5", "val/loss 2 at step 2"] in bars
    assert bars[-1] == ["window/loss 6.5", "val/loss 4"]


def test_the_table_stands_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it is printed later, when BatchNormGuard knows what trains."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    fit(BatchNormGuard(), StepProgress())
    screen = re.sub(r"\x1b\[[0-9;?]*m", "", terminal.getvalue())
    # The bar is cleared before the table, and drawn again below it.
    above, _, below = screen.partition("trainkit")
    assert above.endswith("\r\x1b[2K")
    assert "step" in below


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


class Stopping(Callback):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        if trainer.global_step == 3:
            raise self.error


@pytest.mark.parametrize(("error", "last"), [(Stopped(), 3), (KeyError("x"), 2)])
def test_the_bar_of_a_run_that_was_stopped_shows_its_last_step(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, last: int
) -> None:
    """After an error nothing more is read from the device."""
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setattr(StepProgress, "_is_due", lambda self, step, before: step == 2)
    bars: list[int] = []
    keep = StepBar.draw
    monkeypatch.setattr(
        StepBar, "draw", lambda self, n, texts: (bars.append(n), keep(self, n, texts))
    )
    with pytest.raises(type(error)):
        fit(StepProgress(), Stopping(error), module=Counting(), limit_val_batches=0)
    assert bars[-1] == last
