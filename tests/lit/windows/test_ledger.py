"""What the ledger holds equals the sum over all windows, logged or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from tests.helpers import TokenModule, loader, pad, ragged_sequences, trainer
from tests.lit.front.test_optimizers import Gan
from tests.lit.fronts import Mixed, windows_of
from tests.lit.logs.test_monitor import BATCH, DATA, WINDOW, Record, recorded
from trainkit import AccumulationCallback, PerSample, PerToken, Uniform, WindowMonitor

EPOCHS = 5  # fifteen windows, more than the first ones, which count samples anyway


def totals(epochs: int = EPOCHS) -> list[tuple[float, float]]:
    """Tokens and samples seen after each window, from the data."""
    found, tokens, samples = [], 0, 0
    for _ in range(epochs):
        for start in range(0, len(DATA), BATCH * WINDOW):
            window = DATA[start : start + BATCH * WINDOW]
            tokens += sum(len(labels) for _, labels in window)
            samples += len(window)
            found.append((tokens, samples))
    return found


def seen(record: Record) -> list[tuple[float, float]]:
    rows = record.of_windows().values()
    return [(row["window/seen"], row["window/samples_seen"]) for row in rows]


@pytest.mark.parametrize("every", [1, 4])
def test_totals_count_the_windows_that_are_not_logged_too(every: int) -> None:
    record = recorded(TokenModule(), PerToken(), every=every, max_epochs=EPOCHS)
    logged = [n for n in range(1, len(totals()) + 1) if n == 1 or n % every == 0]
    assert seen(record) == [totals()[n - 1] for n in logged]


@pytest.mark.parametrize(("strategy", "unit"), [(PerSample(), 1), (Uniform(), None)])
def test_what_was_seen_is_in_the_unit_of_the_strategy(strategy: Any, unit: Any) -> None:
    record = recorded(TokenModule(), strategy, max_epochs=EPOCHS)
    last = seen(record)[-1]
    micro_batches = 10 * EPOCHS
    assert last == (totals()[-1][1] if unit else micro_batches, totals()[-1][1])


def test_two_monitors_do_not_count_twice() -> None:
    record = Record()
    monitors = [WindowMonitor(1), WindowMonitor(4)]
    callbacks = [AccumulationCallback(PerToken()), *monitors]
    train(record, EPOCHS, *callbacks)
    assert seen(record)[-1] == totals()[-1]


def train(record: Record, epochs: int, *callbacks: Any, resume: Any = None) -> None:
    fit = trainer(
        WINDOW,
        logger=record,
        max_epochs=epochs,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        log_every_n_steps=1,
        callbacks=list(callbacks),
    )
    fit.fit(TokenModule(), loader(DATA, BATCH), ckpt_path=resume, weights_only=False)


@pytest.mark.filterwarnings("ignore:accumulation. ")  # the loader starts again
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.filterwarnings("ignore:You.re resuming from a checkpoint that ended")
@pytest.mark.parametrize("step", [5, 12])
def test_a_resumed_run_goes_on_where_the_checkpoint_was_written(
    tmp_path: Path, step: int
) -> None:
    """In mid-epoch, and at the end of one."""

    def callbacks() -> list[Any]:
        return [AccumulationCallback(PerToken()), WindowMonitor(1)]

    straight, resumed = Record(), Record()
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    train(straight, EPOCHS, *callbacks(), saves)
    (saved,) = tmp_path.glob(f"*step={step}.ckpt")
    train(resumed, EPOCHS, *callbacks(), resume=saved)
    assert seen(straight) == totals()
    first = next(iter(resumed.of_windows().values()))
    assert first["window/seen"] - first["window/weight"] == totals()[step - 1][0]
    if step == 12:
        assert seen(resumed) == totals()[step:]


def test_a_second_training_with_the_same_callback_starts_at_nothing() -> None:
    callbacks = [AccumulationCallback(PerToken()), WindowMonitor(1)]
    for _ in range(2):
        record = Record()
        train(record, 1, *callbacks)
        assert seen(record) == totals(1)


@pytest.mark.parametrize("front", ["mixin", "callback"])
def test_a_second_fit_of_one_trainer_continues_the_totals(front: str) -> None:
    record = Record()
    kinds = {"mixin": Mixed, "callback": TokenModule}
    callbacks = [AccumulationCallback(PerToken())] if front == "callback" else []
    options: Any = {"callbacks": [*callbacks, WindowMonitor(1)]}
    fit = trainer(WINDOW, logger=record, max_epochs=2, log_every_n_steps=1, **options)
    module = kinds[front]()
    fit.fit(module, loader(DATA, BATCH))
    fit.fit_loop.max_epochs = EPOCHS
    fit.fit(module, loader(DATA, BATCH))
    assert seen(record) == totals()


@pytest.mark.filterwarnings("ignore:accumulation. ")  # the loader starts again
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_an_older_checkpoint_has_sums_in_place_of_a_ledger(tmp_path: Path) -> None:
    def callbacks() -> list[Any]:
        return [AccumulationCallback(PerToken()), WindowMonitor(1)]

    saves = ModelCheckpoint(tmp_path, every_n_train_steps=12)
    train(Record(), 4, *callbacks(), saves)
    (saved,) = tmp_path.iterdir()
    checkpoint = torch.load(saved, weights_only=False)
    del checkpoint["trainkit"]["ledger"]
    checkpoint["trainkit_seen"] = {0: list(map(float, totals()[11]))}
    torch.save(checkpoint, saved)
    record = Record()
    train(record, EPOCHS, *callbacks(), resume=saved)
    assert seen(record) == totals()[12:]


@pytest.mark.filterwarnings("ignore:accumulation. ")  # the loader starts again
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_samples_that_nobody_counted_are_not_shown(tmp_path: Path) -> None:
    """Without a monitor only the first eight windows count their samples."""
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=12)
    train(Record(), 4, AccumulationCallback(PerToken()), saves)
    (saved,) = tmp_path.iterdir()
    record = Record()
    callbacks = [AccumulationCallback(PerToken()), WindowMonitor(1)]
    train(record, EPOCHS, *callbacks, resume=saved)
    rows = list(record.of_windows().values())
    assert [row["window/seen"] for row in rows] == [n for n, _ in totals()[12:]]
    assert not any("window/samples_seen" in row for row in rows)


def test_each_optimizer_has_its_own_totals() -> None:
    record = recorded(Gan(), accumulate=1, max_epochs=1)
    for index in (0, 1):
        rows = [row for _, row in record.rows if f"window/{index}/seen" in row]
        weights = torch.tensor([row[f"window/{index}/weight"] for row in rows])
        found = torch.tensor([row[f"window/{index}/seen"] for row in rows])
        assert torch.equal(found, weights.cumsum(0))


def test_samples_that_cannot_be_counted_are_not_shown() -> None:
    def ragged(samples: Any) -> dict[str, Any]:
        return pad(samples) | {"other": torch.zeros(7)}

    record = recorded(TokenModule(), PerToken(), collate=ragged)
    rows = list(record.of_windows().values())
    assert "window/samples_seen" not in rows[0]
    assert rows[0]["window/seen"] == totals()[0][0]


@pytest.mark.parametrize("strategy", [PerSample(), PerToken(), PerSample(size="ids")])
def test_samples_of_the_first_windows_are_counted_by_any_strategy(
    strategy: Any,
) -> None:
    """Where samples are what a micro-batch weighs, they are not counted twice."""
    fitted = trainer(2, max_epochs=1, callbacks=[AccumulationCallback(strategy)])
    data: Any = ragged_sequences(10)
    batches = DataLoader(data, batch_sampler=[[0, 1, 2], [3], [4, 5]], collate_fn=pad)
    fitted.fit(TokenModule(), batches)
    window = windows_of(fitted).last_window
    assert window is not None
    assert float(window.samples) == 2
    account = windows_of(fitted).ledger.of()
    assert account is not None
    assert float(account.samples) == 6
