"""What a training has seen equals the sum over all windows, logged or not."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.helpers import loader, pad, trainer
from tests.lit.fronts import SEQUENCES, WINDOW
from tests.zoo.callbacks import Table
from tests.zoo.modules import Gan, Plain, on_front
from trainkit import AccumulationCallback, PerSample, PerToken, Uniform, WindowMonitor
from trainkit.core.ledger import NUM_WAITING

pytestmark = [
    pytest.mark.filterwarnings("ignore:accumulation. "),  # the loader starts again
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:You.re resuming from a checkpoint that ended"),
]
BATCH = 4
EPOCHS = 5  # fifteen windows
BY_TOKENS = partial(AccumulationCallback, PerToken())


def totals(epochs: int = EPOCHS) -> list[tuple[float, float]]:
    """Tokens and samples seen after each window, from the data."""
    found, tokens, samples = [], 0, 0
    for _ in range(epochs):
        for start in range(0, len(SEQUENCES), BATCH * WINDOW):
            window = SEQUENCES[start : start + BATCH * WINDOW]
            tokens += sum(len(labels) for _, labels in window)
            samples += len(window)
            found.append((tokens, samples))
    return found


def train(
    *callbacks: Any,
    epochs: int = EPOCHS,
    module: Any = None,
    resume: Any = None,
    collate: Any = pad,
    **options: Any,
) -> tuple[list[tuple[float, float | None]], Any]:
    """What each row of a monitor has seen, and the Trainer."""
    table = Table()
    saves = any(isinstance(each, ModelCheckpoint) for each in callbacks)
    logs: dict[str, Any] = {"logger": table, "log_every_n_steps": 1}
    options = {"accumulate": WINDOW, "enable_checkpointing": saves, **logs, **options}
    fitted = trainer(max_epochs=epochs, callbacks=list(callbacks), **options)
    batches = loader(SEQUENCES, BATCH, collate=collate)
    fitted.fit(module or Plain(), batches, ckpt_path=resume, weights_only=False)
    return seen(table), fitted


def seen(table: Table) -> list[tuple[float, float | None]]:
    rows = [row for row in table.rows if "window/seen" in row]
    return [(row["window/seen"], row.get("window/samples_seen")) for row in rows]


def test_totals_count_the_windows_that_are_not_logged_too() -> None:
    """Two monitors do not count twice; a second training starts at nothing; a second
    `fit` of one Trainer continues."""
    callbacks = [BY_TOKENS(), WindowMonitor(1), WindowMonitor(4)]
    found, _ = train(*callbacks)
    steps = range(3 * EPOCHS)
    logged = [n for n in steps for every in (1, 4) if not n or not (n + 1) % every]
    assert found == [totals()[n] for n in logged]
    module, ours = on_front("mixin")
    found, fitted = train(*ours, *callbacks[1:2], module=module, epochs=1)
    assert found == totals(1)
    fitted.fit_loop.max_epochs = 2
    fitted.fit(module, loader(SEQUENCES, BATCH))
    assert seen(fitted.logger) == totals(2)


@pytest.mark.parametrize(
    ("strategy", "total"), [(PerSample(), totals(1)[-1][1]), (Uniform(), 10)]
)
def test_what_was_seen_is_in_the_unit_of_the_strategy(
    strategy: Any, total: Any
) -> None:
    found, _ = train(AccumulationCallback(strategy), WindowMonitor(1), epochs=1)
    assert found[-1] == (total, totals(1)[-1][1])


@pytest.mark.parametrize("step", [5, 6])
def test_a_resumed_run_goes_on_where_the_checkpoint_was_written(
    tmp_path: Path, step: int
) -> None:
    """In mid-epoch, and at the end of one."""
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    straight, _ = train(BY_TOKENS(), WindowMonitor(1), saves, epochs=3)
    assert straight == totals(3)
    (saved,) = tmp_path.glob(f"*step={step}.ckpt")
    mine = [BY_TOKENS(), WindowMonitor(1)]
    resumed, fitted = train(*mine, resume=saved, epochs=3)
    first = fitted.logger.column("window/weight")[0]
    assert resumed[0][0] - first == totals()[step - 1][0]
    if step == 6:
        assert resumed == totals(3)[step:]


@pytest.mark.parametrize("strategy", [PerSample(), PerToken()])
def test_samples_that_nobody_counted_are_not_shown(
    tmp_path: Path, strategy: Any
) -> None:
    """Without a monitor windows do not; but where samples are what a micro-batch
    weighs, the weights say it."""
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=12)
    train(AccumulationCallback(strategy), saves, epochs=4)
    (saved,) = tmp_path.iterdir()
    mine = [AccumulationCallback(strategy), WindowMonitor(1)]
    found, _ = train(*mine, epochs=5, resume=saved)
    rest = totals()[12:]
    if isinstance(strategy, PerToken):
        assert found == [(tokens, None) for tokens, _ in rest]
    else:
        assert [row[0] for row in found] == [samples for _, samples in rest]


def test_samples_that_cannot_be_counted_are_not_shown() -> None:
    def uneven(samples: Any) -> dict[str, Any]:
        return pad(samples) | {"other": torch.zeros(7)}

    found, _ = train(BY_TOKENS(), WindowMonitor(1), collate=uneven, epochs=1)
    assert found[0] == (totals()[0][0], None)


def test_each_optimizer_has_its_own_totals() -> None:
    _, fitted = train(WindowMonitor(1), module=Gan(), accumulate=1, epochs=1)
    for index in (0, 1):
        weights, found = (
            torch.tensor(fitted.logger.column(f"window/{index}/{name}"))
            for name in ("weight", "seen")
        )
        assert len(found)
        assert torch.equal(found, weights.cumsum(0))


def test_windows_that_nobody_asks_for_do_not_wait_for_ever() -> None:
    """Nor are they lost where a second `fit` continues."""
    callback, module = BY_TOKENS(), Plain()
    epochs = NUM_WAITING // len(totals(1)) + 1
    _, fitted = train(callback, module=module, epochs=epochs)
    assert len(callback.ledger.waiting) == len(totals(epochs)) - NUM_WAITING
    fitted.fit_loop.max_epochs = epochs + 1
    fitted.fit(module, loader(SEQUENCES, BATCH))
    account = callback.ledger.of()
    assert account is not None
    assert account.num_windows == len(totals(epochs + 1))
    assert float(account.weight) == totals(epochs + 1)[-1][0]
