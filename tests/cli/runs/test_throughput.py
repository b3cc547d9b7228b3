"""What a training trains on in a second, by a clock that only the test moves."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import LambdaCallback

from tests.cli.report.runs import SUMMARY, ended, page_of, run_folder
from tests.helpers import pad, quiet_lightning, ragged_sequences, trainer
from trainkit import AccumulationCallback, PerSample, PerToken, WindowMonitor
from trainkit.cli.runs import throughput
from trainkit.cli.runs.summary import rows, throughput_text
from trainkit.cli.runs.throughput import Throughput
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


def failing(trainer: Any, *_: Any) -> None:
    if trainer.global_step == 3:
        raise KeyError("an error")


def fitted(
    clock: Clock, *callbacks: Any, measured: Any = None, **options: Any
) -> Throughput:
    """The measure of a training of two epochs."""
    measured = measured or Throughput()
    data = Slow(clock, [dict(batch) for batch in BATCHES])
    how = {"max_epochs": 2, "num_sanity_val_steps": 1, **options}
    with quiet_lightning():
        each: Any = trainer(2, callbacks=[measured, *callbacks], **how)
        with suppress(KeyError):
            each.fit(Net(clock), data, Slow(clock, BATCHES[:1]))
    assert not {"start", "stop"} & vars(each.profiler).keys()  # given back
    for copied in (copy.deepcopy(measured), pickle.loads(pickle.dumps(measured))):
        assert copied._step == -1 < measured._step  # a copy begins anew
    return measured


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
def test_it_is_measured_without_what_lies_between_steps(
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
    measured = fitted(clock, *callbacks, val_check_interval=3)
    assert clock.now > 16 * CHECKPOINT + FIRST
    assert measured.facts() == {
        "steps": NUM_MEASURED,
        "seconds": NUM_MEASURED * SECONDS,
        "steps_per_second": pytest.approx(1 / SECONDS),
        "samples_per_second": samples and pytest.approx(samples),
        "tokens_per_second": tokens and pytest.approx(tokens),
        "padding": padding and pytest.approx(padding),
        "waiting": pytest.approx(FETCH / (STEP + FETCH)),
    }


@pytest.mark.parametrize("options", [{"max_steps": 1}, {"fast_dev_run": 2}])
def test_one_step_is_not_measured(clock: Clock, options: dict[str, Any]) -> None:
    assert fitted(clock, AccumulationCallback(PerSample()), **options).facts() is None


def test_a_training_that_fails_has_what_it_had_and_the_next_begins_anew(
    clock: Clock,
) -> None:
    measured, steps = Throughput(), []
    for fails in ([LambdaCallback(on_train_batch_start=failing)], []):
        fitted(clock, AccumulationCallback(PerSample()), *fails, measured=measured)
        facts = measured.facts()
        assert facts is not None
        assert facts["seconds"] == facts["steps"] * SECONDS
        assert facts["samples_per_second"] == pytest.approx(8 / SECONDS)
        steps.append(facts["steps"])
    assert steps == [2, NUM_MEASURED]


def test_the_wait_for_the_device_belongs_to_the_last_step(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(torch.Tensor):
        """On its way until somebody waits for it."""

        def tolist(self) -> Any:
            clock.now += 7.0
            return super().tolist()

    change_sums(monkeypatch, lambda sums: sums.as_subclass(Late))
    facts = fitted(clock, AccumulationCallback(PerSample())).facts()
    assert facts is not None
    assert facts["seconds"] == NUM_MEASURED * SECONDS + 7


def change_sums(
    monkeypatch: pytest.MonkeyPatch,
    how: Any = lambda sums: sums,
    *,
    counts: bool = True,
) -> None:
    """Of what the windows add up to, and whether all samples were counted."""
    of = Ledger.of

    def changed(ledger: Ledger, index: int = 0) -> Any:
        account: Any = copy.copy(of(ledger, index))
        account.sums, account.counts_samples = how(account.sums), counts
        return account

    monkeypatch.setattr(Ledger, "of", changed)


def test_samples_are_those_that_the_windows_have_on_all_ranks(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window on ranks counts those of all; the control is that of one rank, above."""
    change_sums(monkeypatch, lambda sums: 2 * sums)
    facts = fitted(clock, AccumulationCallback(PerSample())).facts()
    assert facts is not None
    assert facts["samples_per_second"] == pytest.approx(2 * 8 / SECONDS)
    monkeypatch.undo()
    monkeypatch.setattr(throughput, "perf_counter", clock)
    change_sums(monkeypatch, counts=False)  # as a resumed run that did not count
    facts = fitted(clock, AccumulationCallback(PerSample())).facts()
    assert facts is not None
    assert facts["samples_per_second"] is None


# ---- in words ------------------------------------------------------------------------


def test_the_table_and_the_report_say_what_the_summary_has(tmp_path: Path) -> None:
    """Of a run that was killed, nothing is known."""
    folder = run_folder(tmp_path, [{"step": 4, "window/loss": 1}])
    assert "throughput" not in page_of(folder)
    known = dict(zip(NAMES, (1.5, 10.0, 100.0, 0.23, 0.075), strict=True))
    facts = ended(tmp_path, throughput={"steps": 3, "seconds": 2.0, **known})
    said = "10 samples/s, 100 tokens/s, 23% padding, 8% of the time waiting for data"
    assert said in page_of(folder)
    assert rows(facts)[-1] == ("throughput", said)
    assert rows(SUMMARY | {"throughput": None}) == rows(SUMMARY)


NAMES = "steps_per_second samples_per_second tokens_per_second padding waiting".split()


@pytest.mark.parametrize(
    ("known", "said"),
    [
        (
            (1.5, 1238.4, 38149.0, 0.124, 0.03),
            "1,240 samples/s, 38,100 tokens/s, 12% padding, 3% of the time waiting for "
            "data",
        ),
        ((2.0, None, None, None, 0), "2 steps/s, 0% of the time waiting for data"),
    ],
)
def test_numbers_have_three_digits_and_what_is_not_known_is_left_out(
    known: tuple[Any, ...], said: str
) -> None:
    assert throughput_text(dict(zip(NAMES, known, strict=True))) == said
