"""`step_times.csv`, by a clock that only the test moves."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import LambdaCallback

from tests.helpers import loader as loader_of
from tests.helpers import pad, quiet_lightning, ragged_sequences, run_ranks, trainer
from trainkit import AccumulationCallback, PerSample, PerToken, WindowMonitor
from trainkit.cli.report import step_times
from trainkit.cli.report.run import read_step_times, throughput
from trainkit.cli.report.step_times import StepTimes
from trainkit.cli.runs.folder import RunFolder

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
    saving = LambdaCallback(on_train_batch_end=save)
    times = fitted(clock, tmp_path, *callbacks, saving, val_check_interval=3)
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


def two_ranks(rank: int, world: int, path: Path) -> None:
    clock = Clock()
    step_times.perf_counter = clock  # type: ignore[assignment]
    data = loader_of(ragged_sequences(16), 2, collate=pad)
    callbacks = [StepTimes(RunFolder(path)), AccumulationCallback(PerSample())]
    how = {"strategy": "ddp", "devices": world, "use_distributed_sampler": True}
    with quiet_lightning():
        each = trainer(2, callbacks=callbacks, max_epochs=1, **how)
        each.fit(Net(clock), data)


@pytest.mark.filterwarnings("ignore")
def test_samples_are_those_of_all_ranks(tmp_path: Path) -> None:
    """Of 16 samples, 8 are in the first step; a rank takes two batches a step."""
    run_ranks(two_ranks, 2, tmp_path)
    found = throughput(read_step_times(tmp_path / "step_times.csv"))
    assert found is not None
    assert found["steps"] == 1
    assert found["samples_per_second"] == pytest.approx(8 / (2 * STEP))


def test_a_full_disk_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = StepTimes(RunFolder(tmp_path / "gone"))
    one: Any = {"is_global_zero": True, "fast_dev_run": False, "callbacks": []}
    each = SimpleNamespace(global_step=1, **one)
    times.on_train_batch_end(each, None, None, None, 0)
    times.teardown(None, None, "fit")
    assert "trainkit | report: no throughput: " in capsys.readouterr().out
