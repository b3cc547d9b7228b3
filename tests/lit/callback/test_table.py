"""The table before training: once, on rank 0, in order, plain or rich."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from torch.utils.data import DataLoader

from tests.helpers import pad, ragged_sequences, run_ranks, trainer
from tests.lit.fronts import Mixed, micro_batches
from tests.lit.schedule.scheduling import FRONTS, SEQUENCES, batches, fitted, make
from trainkit import AccumulationSchedule, BatchNormGuard, StepProgress
from trainkit.lit.callback.table import say, show

SCHEDULE = {0: 4, 3: 3, 5: 1}


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("front", FRONTS)
def test_plan_is_printed_once_in_order(
    front: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sizes of windows, then the step."""
    ours = AccumulationSchedule(SCHEDULE)
    fitted(front, ours, loader=batches(4), max_epochs=2)
    assert lines(capsys) == [
        "trainkit | accumulation: 4 from epoch 0 on, 3 from epoch 3 on, "
        "1 from epoch 5 on: 6 steps in all",
        "trainkit | step: per-device batch 4 x accumulation 4 x ranks 1 = 16 samples a "
        "step, weighed by PerToken",
    ]


def test_plan_of_an_unknown_batch_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    fitted("mixin", accumulate=5, max_epochs=1)
    assert lines(capsys) == [
        "trainkit | step: per-device batch not known (measured over the first windows) "
        "x accumulation 5 x ranks 1, weighed by PerToken",
        "trainkit | windows: 2 full windows an epoch",
    ]


def test_plan_of_a_long_schedule_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    ours = AccumulationSchedule.ramp(start=1, end=16, over=15_000)
    fitted("mixin", ours, max_epochs=1)
    assert lines(capsys)[0] == (
        "trainkit | accumulation: 1 from step 0 on, 2 from step 1,000 on, "
        "3 from step 2,000 on, ..., 16 from step 15,000 on: 10 steps in all"
    )


@pytest.mark.filterwarnings("ignore:accumulate_grad_batches=12. the epoch has only 10")
def test_plan_of_an_epoch_shorter_than_the_window(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The window is what an epoch can fill (pytorch-lightning#21808)."""
    fitted("mixin", loader=batches(4), accumulate=12, max_epochs=1)
    step, epoch = lines(capsys)
    assert "x accumulation 10 x ranks 1 = 40 samples a step" in step
    assert epoch == "trainkit | windows: 1 full window an epoch"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plan_in_a_terminal_is_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    show([("step", "64 samples"), ("epoch", "97 windows")])
    text = terminal.getvalue()
    assert "trainkit |" not in text
    title, top, first, second, bottom = text.splitlines()
    assert "trainkit" in title
    assert "step" in first
    assert "97 windows" in second
    assert len(top) == len(bottom)


def test_plan_of_brackets_is_shown_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no markup."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    show([("lr", "[0.1] -> [0.2] [bold]")])
    assert "[0.1] -> [0.2] [bold]" in terminal.getvalue()


def test_a_line_of_its_own_is_cut_between_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "not measured: " + " ".join(["word"] * 20)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "60")
    say(trainer(), ("proof", text))
    cut = terminal.getvalue().splitlines()
    assert len(cut) > 1
    assert all(len(line) <= 60 for line in cut)
    whole = f"trainkit | proof: {text}"
    assert " ".join(line.strip() for line in cut) == whole
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stdout", pipe)
    say(trainer(), ("proof", text))
    assert pipe.getvalue() == f"{whole}\n"


def test_empty_plan_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    show([])
    assert lines(capsys) == []


def test_plan_without_a_standard_output_is_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As under pythonw, where print() writes nowhere as well."""
    monkeypatch.setattr(sys, "stdout", None)
    show([("step", "64 samples")])


def train_printing(rank: int, world: int) -> str:
    sys.stdout = io.StringIO()
    trainer(
        2, strategy="ddp", devices=world, max_epochs=1, use_distributed_sampler=True
    ).fit(Mixed(), even_loader())
    return sys.stdout.getvalue()


def even_loader() -> Any:
    data: Any = ragged_sequences(36)
    return DataLoader(data, batch_size=4, collate_fn=pad)


@pytest.mark.filterwarnings("ignore")
def test_plan_is_printed_on_the_first_rank_alone() -> None:
    first, second = run_ranks(train_printing, 2)
    assert second == ""
    assert first.splitlines() == [
        "trainkit | step: per-device batch 4 x accumulation 2 x ranks 2 = 16 samples a "
        "step, weighed by PerToken",
        "trainkit | windows: 2 full windows + 1 short one (1 of 2 micro-batches) "
        "an epoch",
    ]


def test_each_fit_prints_its_own_plan(capsys: pytest.CaptureFixture[str]) -> None:
    for size in (2, 5):
        module, ours = make("callback")
        fit = trainer(size, callbacks=ours, max_epochs=1)
        fit.fit(module, micro_batches(SEQUENCES))
    assert len(lines(capsys)) == 4


def test_a_resumed_fit_says_from_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run is named by its folder, relative to the current one if it is below it."""
    monkeypatch.chdir(tmp_path)
    module, ours = make("callback")
    first = trainer(2, callbacks=ours, max_epochs=1)
    first.fit(module, micro_batches(SEQUENCES))
    assert "resumed" not in capsys.readouterr().out
    for path in ("out/run/checkpoints/last.ckpt", "elsewhere.ckpt"):
        first.save_checkpoint(tmp_path / path)
    step = f"trainkit | training: resumed at step {first.global_step}"

    def resumed(path: str) -> str:
        module, ours = make("callback")
        trainer(2, callbacks=ours, max_epochs=2).fit(
            module, micro_batches(SEQUENCES), ckpt_path=path
        )
        return lines(capsys)[-1]

    assert resumed("out/run/checkpoints/last.ckpt") == f"{step} of out/run"
    assert resumed(str(tmp_path / "elsewhere.ckpt")) == f"{step} from elsewhere.ckpt"
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    run = tmp_path / "out" / "run"
    assert resumed(f"{run}/checkpoints/last.ckpt") == f"{step} of {run}"


@pytest.mark.parametrize("guard", [[], [BatchNormGuard()]], ids=["early", "late"])
@pytest.mark.parametrize("checks", [0, 1])
@pytest.mark.parametrize("bar", [StepProgress, RichProgressBar, TQDMProgressBar])
def test_plan_is_printed_once_beside_every_bar(
    bar: Any, checks: int, guard: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the bar of tqdm is drawn, and after it has closed that of the sanity
    check, its own `print` writes nothing. With the guard the table is printed late."""
    module, ours = make("callback")
    module.validation_step = lambda batch, batch_idx: None  # type: ignore[method-assign]
    data = micro_batches(SEQUENCES)
    for _ in range(2):
        trainer(
            2, callbacks=[*ours, *guard, bar()], max_epochs=1,
            num_sanity_val_steps=checks, enable_progress_bar=True,
        ).fit(module, data, data)  # fmt: skip
        assert capsys.readouterr().out.count("trainkit | step: ") == 1
