"""`step_times.csv`: written by a clock that only the test moves, and read again."""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import LambdaCallback

from tests.cli.report.runs import SUMMARY, charts_of, page_of, run_folder, titles
from tests.helpers import pad, quiet_lightning, ragged_sequences, trainer
from trainkit import AccumulationCallback, PerSample, PerToken, WindowMonitor
from trainkit.cli.report import step_times
from trainkit.cli.report.run import rates, read_step_times, throughput
from trainkit.cli.report.step_times import StepTimes
from trainkit.cli.runs.folder import RunFolder
from trainkit.cli.runs.summary_rows import rows, throughput_text
from trainkit.core.ledger import Ledger

STEP, FETCH, VALIDATION, CHECKPOINT, FIRST = 4.0, 1.0, 100.0, 1000.0, 10_000.0
"""Seconds of a batch, of the wait for it, of a validation, of a checkpoint, and of what
is prepared in the first batch."""
BATCHES = [pad(ragged_sequences(4)) for _ in range(8)]
NUM_MEASURED = 7  # steps of two epochs of 4, without the first one
SECONDS = 2 * (STEP + FETCH)
"""Of a window of two batches."""


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(step_times, "perf_counter", found)
    return found


class Net(LightningModule):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.net = torch.nn.Embedding(50, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        is_first = batch_idx == 0 and self.global_step == 0
        self.clock.now += STEP + FIRST * is_first
        return self.net(batch["ids"]).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.clock.now += VALIDATION

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.25)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.clock.now += CHECKPOINT


class Slow:
    """A loader that needs a second for each batch."""

    def __init__(self, clock: Clock, batches: list[Any]) -> None:
        self.clock, self.batches = clock, batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            self.clock.now += FETCH
            yield batch


def failing(trainer: Any, *_: Any) -> None:
    if trainer.global_step == 3:
        raise KeyError("an error")


def fitted(clock: Clock, path: Path, *callbacks: Any, **options: Any) -> Any:
    """What `step_times.csv` has of a training of two epochs."""
    data = Slow(clock, [dict(batch) for batch in BATCHES])
    how = {"max_epochs": 2, "num_sanity_val_steps": 1, **options}
    measured = StepTimes(RunFolder(path))
    each: Any
    with quiet_lightning():
        each = trainer(2, callbacks=[measured, *callbacks], **how)
        each.fit(Net(clock), data, Slow(clock, BATCHES[:1]))
    assert not {"start", "stop"} & vars(each.profiler).keys()  # given back
    for copied in (copy.deepcopy(measured), pickle.loads(pickle.dumps(measured))):
        assert copied._step == -1 < measured._step  # a copy begins anew
    return read_step_times(path / "step_times.csv")


LABELS = torch.stack([batch["labels"] for batch in BATCHES])
REAL = 2 * int((LABELS[0] != -100).sum())
PADDING = (LABELS[0] == -100).double().mean().item()


@pytest.mark.parametrize(
    ("strategies", "samples", "tokens", "padding"),
    [
        ([], None, None, None),
        ([PerSample()], 8 / SECONDS, None, None),
        ([PerToken()], 8 / SECONDS, REAL / SECONDS, PADDING),  # with WindowMonitor
    ],
)
def test_each_step_has_its_time_without_what_lies_between(
    strategies: list[Any],
    samples: float | None,
    tokens: float | None,
    padding: float | None,
    clock: Clock,
    tmp_path: Path,
) -> None:
    """The control: with validations and checkpoints there were 33,000 seconds."""

    def save(trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint(tmp_path / "one.ckpt")

    callbacks: list[Any] = [AccumulationCallback(each) for each in strategies]
    callbacks += [WindowMonitor(every_n_steps=1000)] * (tokens is not None)
    callbacks.append(LambdaCallback(on_train_batch_end=save))
    times = fitted(clock, tmp_path, *callbacks, val_check_interval=3)
    assert clock.now > 16 * CHECKPOINT + FIRST
    assert times["step"].tolist() == [*range(2, NUM_MEASURED + 2)]
    assert times["seconds"].tolist() == [SECONDS] * NUM_MEASURED
    assert throughput(times) == {
        "steps": NUM_MEASURED,
        "seconds": NUM_MEASURED * SECONDS,
        "steps_per_second": pytest.approx(1 / SECONDS),
        "samples_per_second": samples and pytest.approx(samples),
        "tokens_per_second": tokens and pytest.approx(tokens),
        "padding": padding and pytest.approx(padding),
        "waiting": pytest.approx(FETCH / (STEP + FETCH)),
    }


@pytest.mark.parametrize("options", [{"max_steps": 1}, {"fast_dev_run": 2}])
def test_one_step_is_not_measured(
    clock: Clock, options: dict[str, Any], tmp_path: Path
) -> None:
    callback = AccumulationCallback(PerSample())
    assert throughput(fitted(clock, tmp_path, callback, **options)) is None
    assert (tmp_path / "step_times.csv").exists() == ("max_steps" in options)


def test_a_training_that_fails_has_what_it_had_and_another_process_writes_on(
    clock: Clock, tmp_path: Path
) -> None:
    windows = AccumulationCallback(PerSample())
    with pytest.raises(KeyError):
        fitted(clock, tmp_path, windows, LambdaCallback(on_train_batch_start=failing))
    times = read_step_times(tmp_path / "step_times.csv")
    assert times["seconds"].tolist() == [SECONDS] * 2
    times = fitted(clock, tmp_path, AccumulationCallback(PerSample()))
    text = (tmp_path / "step_times.csv").read_text()
    assert text.count("step,") == 1
    assert text.count("\n1,nan,") == 2
    assert len(times["step"]) == NUM_MEASURED


def test_the_wait_for_the_device_belongs_to_the_last_step(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(step_times.LateReading):
        """On its way until somebody waits for it."""

        arrived = False  # type: ignore[assignment]

        def values(self) -> Any:
            clock.now += 7.0
            return super().values()

    monkeypatch.setattr(step_times, "LateReading", Late)
    times = fitted(clock, tmp_path, AccumulationCallback(PerSample()))
    *others, last = times["seconds"]
    assert others == [SECONDS] * (NUM_MEASURED - 1)
    assert last > SECONDS + 7


def test_samples_are_those_that_the_windows_have_on_all_ranks(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window on ranks counts those of all; the control is that of one rank, above."""
    of = Ledger.of

    def on_two_ranks(ledger: Ledger, index: int = 0) -> Any:
        account: Any = copy.copy(of(ledger, index))
        account.sums = 2 * account.sums
        return account

    monkeypatch.setattr(Ledger, "of", on_two_ranks)
    found = throughput(fitted(clock, tmp_path, AccumulationCallback(PerSample())))
    assert found is not None
    assert found["samples_per_second"] == pytest.approx(2 * 8 / SECONDS)


def test_a_full_disk_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = StepTimes(RunFolder(tmp_path / "gone"))
    one: Any = {"is_global_zero": True, "fast_dev_run": False, "callbacks": []}
    each = SimpleNamespace(global_step=1, **one)
    times.on_train_batch_end(each, None, None, None, 0)
    times.teardown(None, None, "fit")
    assert "trainkit | report: no throughput: " in capsys.readouterr().out


# ---- what is read from it ------------------------------------------------------------


HEAD = "step,seconds,waiting,samples,tokens,padding\n"
TIMES = "1,nan,nan,4,60,40\n2,0.5,0.1,8,90,10\n3,0.25,0.05,4,60,0\n4,1.25,0,8,50,50\n"


def times(path: Path, text: str = HEAD + TIMES) -> Path:
    file = path / "step_times.csv"
    file.write_text(text)
    return file


def test_it_is_what_was_counted_over_the_time(tmp_path: Path) -> None:
    known = read_step_times(times(tmp_path))
    assert throughput(known) == {
        "steps": 3,
        "seconds": 2.0,
        "steps_per_second": 1.5,
        "samples_per_second": 10,
        "tokens_per_second": 100,
        "padding": pytest.approx(60 / 260),
        "waiting": pytest.approx(0.15 / 2),
    }
    tokens, samples = rates(known).values()
    assert samples.shown == [(2, 16), (3, 16), (4, 6.4)]
    assert tokens.shown == [(2, 180), (3, 240), (4, 40)]


def test_the_table_the_chart_and_the_summary_agree(tmp_path: Path) -> None:
    """By the seconds of each step the mean of the chart is the number of the table."""
    folder = run_folder(tmp_path, [{"step": 4, "window/loss": 1, "window/weight": 9}])
    known = read_step_times(times(tmp_path))
    speed = {"throughput": throughput(known)}
    said = "10 samples/s, 100 tokens/s, 23% padding, 8% of the time waiting for data"
    assert said in page_of(folder)  # as of a run that was killed
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY | speed))
    assert said in page_of(folder)
    assert rows(SUMMARY | speed)[-1] == ("throughput", said)
    assert rows(SUMMARY | {"throughput": None}) == rows(SUMMARY)
    seconds = dict(zip(known["step"], known["seconds"], strict=True))
    for counted in ("samples", "tokens"):
        (line,) = charts_of(folder)[f"Throughput, in {counted} per second"].lines
        mean = sum(rate * seconds[step] for step, rate in line.shown) / 2.0
        assert f"{mean:.0f} {counted}/s" in said


def test_weights_are_not_called_tokens(tmp_path: Path) -> None:
    """The control: what the strategy weighs is not what was counted."""
    seen = [{"step": n, "window/seen": 4 * n, "window/loss": 1} for n in range(1, 5)]
    folder = run_folder(tmp_path, seen)
    (tmp_path / "summary.json").write_text(json.dumps({**SUMMARY, "unit": "tokens"}))
    times(tmp_path, HEAD + re.sub(r"(\d+),(\d+)\n", "0,0\n", TIMES))
    assert titles(page_of(folder)) == ["Loss", "Throughput, in samples per second"]


@pytest.mark.parametrize(
    ("text", "steps", "said"),
    [
        ("", [], None),  # there is no such file
        (HEAD + "1,nan,nan,4,60,40\n", [], None),
        # a process began at step 3
        (HEAD + TIMES + "3,nan,nan,4,60,0\n", [2, 4], "9.14 samples/s, 80 tokens/s, 3"),
        (HEAD + TIMES + "4,0,0,8,50,50\n", [2, 3], "16 samples/s, 200 tokens/s"),
        # killed while writing, after step 4 was done again
        (HEAD + TIMES + "4,0.5,0,8,50,50\n5,0.", [2, 3, 4], "16 samples/s, 160 tokens"),
        ("step,seconds\n1,nan\n2,0.5\n", [], "2 steps/s"),  # of an earlier version
    ],
)
def test_what_is_not_known_is_left_out(
    text: str, steps: list[int], said: str | None, tmp_path: Path
) -> None:
    known = read_step_times(times(tmp_path, text) if text else tmp_path / "none")
    lines = rates(known)
    assert (lines["samples per second"].steps if lines else []) == steps
    measured = throughput(known)
    assert (measured is None) == (said is None)
    assert measured is None or throughput_text(**measured).startswith(said or "")


def test_numbers_have_three_digits() -> None:
    assert throughput_text(1.5, 1238.4, 38149.0, 0.124, 0.03) == (
        "1,240 samples/s, 38,100 tokens/s, 12% padding, 3% of the time waiting for data"
    )
