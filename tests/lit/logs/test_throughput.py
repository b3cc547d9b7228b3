"""Samples and tokens per second, by a clock that only the test moves."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule

from tests.helpers import loader as loader_of
from tests.helpers import pad, quiet_lightning, ragged_sequences, run_ranks, trainer
from trainkit import AccumulationCallback, PerSample, PerToken, WindowMonitor
from trainkit.cli.runs.summary_rows import rows
from trainkit.lit.logs import throughput
from trainkit.lit.logs.throughput import Throughput, throughput_of

STEP, FETCH, VALIDATION, CHECKPOINT, FIRST = 4.0, 1.0, 100.0, 1000.0, 10_000.0
"""Seconds of a batch, of the wait for it, of a validation, of a checkpoint, and of what
is prepared in the first batch."""


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(throughput, "perf_counter", found)
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


class Saving(Callback):
    def __init__(self, path: Any) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        trainer.save_checkpoint(self.path)


BATCHES = [pad(ragged_sequences(4)) for _ in range(8)]


def fitted(clock: Clock, *callbacks: Any, **options: Any) -> Any:
    data = Slow(clock, [dict(batch) for batch in BATCHES])
    with quiet_lightning():
        each = trainer(
            2,
            callbacks=list(callbacks),
            max_epochs=2,
            num_sanity_val_steps=1,
            **options,
        )
        each.fit(Net(clock), data, Slow(clock, [BATCHES[0]]))
    return each


NUM_MEASURED = 7  # steps of two epochs of 4, without the first one
SECONDS = NUM_MEASURED * 2 * (STEP + FETCH)


def test_it_measures_from_the_first_step_on_without_what_lies_between(
    clock: Clock, tmp_path: Any
) -> None:
    each = fitted(
        clock,
        AccumulationCallback(PerToken()),
        WindowMonitor(every_n_steps=1000),
        Throughput(),
        Saving(tmp_path / "one.ckpt"),
        val_check_interval=3,
    )
    found = throughput_of(each)
    assert found is not None
    assert clock.now > 16 * CHECKPOINT + FIRST
    labels = torch.stack([batch["labels"] for batch in BATCHES])
    real = 2 * int((labels[0] != -100).sum())
    assert found["steps"] == NUM_MEASURED
    assert found["seconds"] == pytest.approx(SECONDS)
    assert found["samples_per_second"] == pytest.approx(8 * NUM_MEASURED / SECONDS)
    assert found["tokens_per_second"] == pytest.approx(real * NUM_MEASURED / SECONDS)
    assert found["padding"] == pytest.approx((labels[0] == -100).double().mean().item())
    assert found["waiting"] == pytest.approx(FETCH / (STEP + FETCH))


def test_without_counts_of_tokens_there_are_samples_alone(clock: Clock) -> None:
    each = fitted(clock, AccumulationCallback(PerSample()), Throughput())
    found = throughput_of(each)
    assert found is not None
    assert found["samples_per_second"] == pytest.approx(8 * NUM_MEASURED / SECONDS)
    assert found["tokens_per_second"] is None
    assert found["padding"] is None


def test_without_windows_there_are_steps(clock: Clock) -> None:
    found = throughput_of(fitted(clock, Throughput()))
    assert found is not None
    assert found["samples_per_second"] is None
    assert found["steps_per_second"] == pytest.approx(NUM_MEASURED / SECONDS)


@pytest.mark.parametrize("options", [{"max_steps": 1}, {"fast_dev_run": 2}])
def test_one_step_is_not_measured(clock: Clock, options: dict[str, Any]) -> None:
    callback = AccumulationCallback(PerSample())
    assert throughput_of(fitted(clock, callback, Throughput(), **options)) is None
    assert throughput_of(fitted(clock, AccumulationCallback(PerSample()))) is None


class Failing(Callback):
    def on_train_batch_start(self, trainer: Any, *_: Any, **__: Any) -> None:
        if trainer.global_step == 3:
            raise KeyError("an error")


def test_a_training_that_fails_has_what_it_had(clock: Clock) -> None:
    measured = Throughput()
    with pytest.raises(KeyError):
        fitted(clock, AccumulationCallback(PerSample()), measured, Failing())
    found = measured.facts()
    assert found is not None
    assert found["steps"] == 2
    assert found["seconds"] == pytest.approx(2 * 2 * (STEP + FETCH) + FETCH)


def test_the_profiler_is_given_back_and_copies_begin_anew(clock: Clock) -> None:
    measured = Throughput()
    each = fitted(clock, AccumulationCallback(PerSample()), measured)
    assert not {"start", "stop"} & vars(each.profiler).keys()
    for copied in (copy.deepcopy(measured), pickle.loads(pickle.dumps(measured))):
        assert copied.facts() is None
    assert measured.facts() is not None


def two_ranks(rank: int, world: int) -> Any:
    clock = Clock()
    throughput.perf_counter = clock  # type: ignore[assignment]
    data = loader_of(ragged_sequences(16), 2, collate=pad)
    measured = Throughput()
    with quiet_lightning():
        trainer(
            2, callbacks=[AccumulationCallback(PerSample()), measured], max_epochs=1,
            strategy="ddp", devices=world, use_distributed_sampler=True,
        ).fit(Net(clock), data)  # fmt: skip
    return measured.facts()


@pytest.mark.filterwarnings("ignore")
def test_samples_are_those_of_all_ranks() -> None:
    """Of 16 samples, 8 are in the first step; a rank takes two batches a step."""
    for found in run_ranks(two_ranks, 2):
        assert found["steps"] == 1
        assert found["samples_per_second"] == pytest.approx(8 / (2 * STEP))


FACTS = {
    "status": "finished", "steps": 3, "windows": {}, "metrics": {},
    "micro_batching": None, "learning_rates": [], "plain_accumulation": None,
}  # fmt: skip


def test_the_last_row_says_it() -> None:
    numbers = {
        "steps": 3, "seconds": 2.0, "steps_per_second": 1.5, "padding": 0.124,
        "samples_per_second": 1238.4, "tokens_per_second": 38149.0, "waiting": 0.03,
    }  # fmt: skip
    *_, last = rows(FACTS | {"throughput": numbers})
    assert last == (
        "throughput",
        "1,240 samples/s, 38,100 tokens/s, 12% padding, 3% of the time waiting for "
        "data",
    )
    unknown = dict.fromkeys(numbers) | {"steps_per_second": 1.5}
    *_, last = rows(FACTS | {"throughput": unknown})
    assert last == ("throughput", "1.5 steps/s")
    assert rows(FACTS | {"throughput": None}) == rows(FACTS)  # of an earlier version
    assert "throughput" not in dict(rows(FACTS))
