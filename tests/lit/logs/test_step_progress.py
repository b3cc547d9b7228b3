"""Progress in optimizer steps, with and without a terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import LambdaCallback

from tests.helpers import loader, quiet_lightning, trainer
from tests.zoo.callbacks import Ending, Terminal
from tests.zoo.modules import hooked
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
from trainkit.lit.logs.step_progress import StepBar


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
    plain: bool = False,
    **options: Any,
) -> Any:
    data = loader(list(torch.randn(16, 2)), 2, collate=torch.stack)
    ours = [] if plain else [AccumulationCallback(PerSample())]
    how = {"max_epochs": 1, "num_sanity_val_steps": 0, **options}
    how |= {"callbacks": [*ours, *callbacks], "enable_progress_bar": True}
    each = trainer(accumulate, **how)
    with quiet_lightning():
        each.fit(module or Net(), data, data)
    return each


def lines(capsys: Any) -> list[str]:
    said = capsys.readouterr().out.splitlines()
    return [line for line in said if re.match(r"trainkit \| step .*of", line)]


def logging(self: Any, batch: torch.Tensor, batch_idx: int) -> None:
    self.log_dict({"val/loss": 0.125, "val/other": 0.5})  # not for the bar


Quiet = hooked(Net, validation_step=lambda self, batch, batch_idx: None)
Logging = hooked(Net, validation_step=logging)


class Counting(Quiet):  # type: ignore[misc, valid-type]
    """Its loss is the number of the batch, and it shows each."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = (self.net(batch) * 0 + batch_idx).mean()
        self.log("train/loss", loss, prog_bar=True)
        return loss


class Validated(Counting):
    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val/loss", float(self.global_step), prog_bar=True)


TWICE: dict[str, Any] = {"val_check_interval": 4}  # after steps 2 and 4
CASES: dict[str, tuple[LightningModule, int, dict[str, Any], list[str]]] = {
    # Its loss stands in the line above.
    "now and then": (Net(), 2, {}, ["2: loss 3", "4: loss 3", "4: val/loss 0.125"]),
    "a module that shows nothing": (Quiet(), 50, {}, ["4: loss 3"]),
    "nothing for the bar": (Logging(), 50, {}, ["4: loss 3"]),
    "a line has the numbers of its own step": (
        *(Counting(), 1, {}),
        [f"{n}: loss {2 * n - 1.5:g}, train/loss {2 * n - 1}" for n in (1, 2, 3, 4)],
    ),
    "no line repeats an earlier number": (
        *(Validated(), 1, TWICE),
        [
            *("1: loss 0.5, train/loss 1", "2: loss 2.5, train/loss 3"),
            "2: val/loss 2",
            "3: loss 4.5, train/loss 5",  # without the validation of step 2
            *("4: loss 6.5, train/loss 7", "4: val/loss 4"),
        ],
    ),
    "a validation between two lines": (
        *(Validated(), 50, TWICE),
        ["2: loss 2.5, val/loss 2", "4: loss 6.5, val/loss 4"],
    ),
    "no window, no number, no line": (Quiet(), 50, {"plain": True}, []),
    "no window": (Net(), 50, {"plain": True}, ["4: val/loss 0.125"]),
}


@pytest.mark.parametrize("name", CASES)
def test_the_lines_without_a_terminal(
    name: str, capsys: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    """Also where numbers arrive late, as from a busy GPU."""
    module, every, given, expected = CASES[name]
    options = dict(given)
    for is_late in (False, True):
        monkeypatch.setattr(LateReading, "arrived", not is_late)
        options["default_root_dir"] = tmp_path / str(is_late)
        fit(StepProgress(every_n_steps=every), module=module, **options)
        found = [line.removeprefix("trainkit | step ") for line in lines(capsys)]
        assert [line.replace(" of 4: window/", ": ") for line in found] == [
            line if ": loss" in line else line.replace(":", " of 4:", 1)
            for line in expected
        ]


class TwoOptimizers(Net):
    automatic_optimization = False  # type: ignore[assignment]  # a property in it

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [super().configure_optimizers(), super().configure_optimizers()]


@pytest.mark.parametrize(
    ("every", "options", "num_steps", "expected"),
    [
        # They are counted as `max_steps` does.
        (3, {"max_steps": 10, "max_epochs": 2}, 10, ["4 of 10", "6 of 10", "10 of 10"]),
        # Lightning reckons 8 steps in an epoch of 8 windows, and counts 16.
        (8, {"limit_val_batches": 0}, 16, ["8", "16"]),
    ],
)
def test_steps_of_all_optimizers(
    every: int,
    options: dict[str, Any],
    num_steps: int,
    expected: list[str],
    capsys: Any,
) -> None:
    progress = StepProgress(every_n_steps=every)
    each = fit(progress, accumulate=1, module=TwoOptimizers(), plain=True, **options)
    assert each.global_step == num_steps
    said = capsys.readouterr().out.splitlines()
    steps = [line.split(":")[0] for line in said if line.startswith("trainkit | step ")]
    assert steps == [f"trainkit | step {each}" for each in expected]


def test_a_schedule_says_how_many_steps_there_are_if_it_ends(capsys: Any) -> None:
    schedule = AccumulationSchedule({0: 1, 4: 2}, unit="step")
    fit(schedule, StepProgress(every_n_steps=6), accumulate=1)
    assert lines(capsys)[0] == "trainkit | step 6 of 6: window/loss 3"
    until = LambdaCallback(on_train_epoch_end=lambda t, m: setattr(t, "should_stop", 1))
    progress = StepProgress(every_n_steps=1)
    fit(schedule, progress, until, accumulate=1, max_epochs=-1)
    assert "trainkit | step 1: window/loss 3" in capsys.readouterr().out


@pytest.fixture
def terminal(monkeypatch: Any) -> Callable[[int], Callable[[], str]]:
    """Stands a terminal of some columns in for stdout, and returns what it shows at
    the end, without escape sequences."""
    monkeypatch.setattr(step_progress, "_SECONDS_BETWEEN_UPDATES", 0)
    monkeypatch.setenv("TERM", "xterm")

    def stand_in(columns: int) -> Callable[[], str]:
        screen = Terminal()
        monkeypatch.setattr(sys, "stdout", screen)
        monkeypatch.setenv("COLUMNS", str(columns))

        def shown() -> str:
            whole = screen.getvalue()
            last = re.split(r"\r\x1b\[2K(?:\x1b\[1A\x1b\[2K)*", whole)[-1]
            return re.sub(r"\x1b\[[0-9;?]*\w", "", last).rstrip("\n")

        return shown

    return stand_in


@pytest.fixture
def bars(monkeypatch: Any) -> list[tuple[int, list[str]]]:
    """The steps and the texts with which a bar was drawn."""
    found: list[tuple[int, list[str]]] = []
    keep = StepBar.draw

    def draw(self: StepBar, step: int, texts: list[str]) -> None:
        found.append((step, texts))
        keep(self, step, texts)

    monkeypatch.setattr(StepBar, "draw", draw)
    return found


def test_on_a_terminal_it_draws_a_bar(terminal: Any, bars: Any) -> None:
    """In it the numbers of the last validation stay, as in Lightning's bars."""
    shown = terminal(120)
    fit(StepProgress(), module=Validated(), **TWICE)
    last = r"step .* 4/4 window/loss 6.5, train/loss 7, val/loss 4 0:00:.*"
    assert re.fullmatch(last, shown())
    texts = [each for _, each in bars]
    assert ["window/loss 2.5", "train/loss 3", "val/loss 2"] in texts
    assert ["window/loss 4.5", "train/loss 5", "val/loss 2"] in texts


@pytest.mark.parametrize("columns", [60, 79])
def test_a_number_too_wide_for_its_place_goes_on_below(
    terminal: Any, columns: int
) -> None:
    """Cut, the step 195 would read as 19."""
    shown = terminal(columns)
    bar = StepBar(780)
    bar.draw(247, ["window/loss 0.008396", "val/loss 0.009641 at step 195"])
    bar.close()
    assert max(map(len, shown().splitlines())) <= columns
    for word in ("0.008396", "val/loss", "0.009641", "195"):
        assert re.search(rf"(?<!\S){word}(?![\w.])", shown()), shown()


def test_the_table_stands_above_the_bar(terminal: Any) -> None:
    """Also if it is printed later, when BatchNormGuard knows what trains."""
    terminal(80)
    fit(BatchNormGuard(), StepProgress())
    screen: Any = sys.stdout
    plain = re.sub(r"\x1b\[[0-9;?]*m", "", screen.getvalue())
    # The bar is cleared before the table, and drawn again below it.
    above, _, below = plain.partition("trainkit")
    assert above.endswith("\r\x1b[2K")
    assert "step" in below


def test_a_module_prints_and_what_is_disabled_says_nothing(capsys: Any) -> None:
    """`LightningModule.print` asks the bar whether it is enabled."""

    class Printing(Net):
        def on_train_start(self) -> None:
            self.print("a word [of its own]")

    fit(StepProgress(), module=Printing())
    assert "a word [of its own]" in capsys.readouterr().out
    progress = StepProgress(every_n_steps=1)
    progress.disable()
    fit(progress)
    assert lines(capsys) == []
    progress.enable()
    fit(progress)
    assert len(lines(capsys)) == 5
    for wrong in (0, -1, 1.5):
        with pytest.raises(TrainkitError, match=f"every_n_steps: .* received {wrong}"):
            StepProgress(every_n_steps=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(("error", "last"), [(Stopped(), 3), (KeyError("x"), 2)])
def test_the_bar_of_a_run_that_was_stopped_shows_its_last_step(
    terminal: Any, bars: Any, monkeypatch: Any, error: BaseException, last: int
) -> None:
    """After an error nothing more is read from the device."""
    terminal(80)
    monkeypatch.setattr(StepProgress, "_is_due", lambda self, step, before: step == 2)
    stopping = Ending(5, error)  # in the batch of the third step
    with pytest.raises(type(error)):
        fit(StepProgress(), stopping, module=Counting(), limit_val_batches=0)
    assert bars[-1][0] == last
