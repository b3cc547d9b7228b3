"""What a training has seen equals the sum over all windows, logged or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.helpers import loader, pad, trainer
from tests.lit.fronts import SEQUENCES, WINDOW, windows_of
from tests.recording import Table
from tests.zoo import Gan, Plain, on_front
from trainkit import AccumulationCallback, PerSample, PerToken, Uniform, WindowMonitor

pytestmark = [
    pytest.mark.filterwarnings("ignore:accumulation. "),  # the loader starts again
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:You.re resuming from a checkpoint that ended"),
]
BATCH = 4
EPOCHS = 5  # fifteen windows, more than the first ones, which count samples anyway
BY_TOKENS: Callable[[], AccumulationCallback] = lambda: AccumulationCallback(PerToken())  # noqa: E731


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
    options = {"accumulate": WINDOW, "enable_checkpointing": saves, **options}
    fitted = trainer(
        logger=table,
        max_epochs=epochs,
        log_every_n_steps=1,
        callbacks=list(callbacks),
        **options,
    )
    batches = loader(SEQUENCES, BATCH, collate=collate)
    fitted.fit(module or Plain(), batches, ckpt_path=resume, weights_only=False)
    return seen(table), fitted


def seen(table: Table) -> list[tuple[float, float | None]]:
    rows = [row for row in table.rows if "window/seen" in row]
    return [(row["window/seen"], row.get("window/samples_seen")) for row in rows]


@pytest.mark.parametrize("every", [(1,), (4,), (1, 4)], ids=str)
def test_totals_count_the_windows_that_are_not_logged_too(every: Any) -> None:
    """Two monitors do not count twice; a second training starts at nothing."""
    callbacks = [BY_TOKENS(), *map(WindowMonitor, every)]
    for epochs in (EPOCHS, 1):
        found, _ = train(*callbacks, epochs=epochs)
        logged = [
            n for n in range(3 * epochs) for e in every if not n or not (n + 1) % e
        ]
        assert found == [totals()[n] for n in sorted(logged)]


@pytest.mark.parametrize(
    ("strategy", "total"),
    [(PerSample(), totals()[-1][1]), (Uniform(), 10 * EPOCHS)],
)
def test_what_was_seen_is_in_the_unit_of_the_strategy(
    strategy: Any, total: Any
) -> None:
    found, _ = train(AccumulationCallback(strategy), WindowMonitor(1))
    assert found[-1] == (total, totals()[-1][1])


@pytest.mark.parametrize("front", ["mixin", "callback"])
def test_a_second_fit_of_one_trainer_continues_the_totals(front: str) -> None:
    module, ours = on_front(front)
    found, fitted = train(*ours, WindowMonitor(1), module=module, epochs=2)
    assert found == totals(2)
    fitted.fit_loop.max_epochs = EPOCHS
    fitted.fit(module, loader(SEQUENCES, BATCH))
    assert seen(fitted.logger) == totals()


@pytest.mark.parametrize("step", [5, 12])
def test_a_resumed_run_goes_on_where_the_checkpoint_was_written(
    tmp_path: Path, step: int
) -> None:
    """In mid-epoch, and at the end of one."""
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    straight, _ = train(BY_TOKENS(), WindowMonitor(1), saves)
    assert straight == totals()
    (saved,) = tmp_path.glob(f"*step={step}.ckpt")
    resumed, fitted = train(BY_TOKENS(), WindowMonitor(1), resume=saved)
    first = fitted.logger.column("window/weight")[0]
    assert resumed[0][0] - first == totals()[step - 1][0]
    if step == 12:
        assert resumed == totals()[step:]


@pytest.mark.parametrize("strategy", [PerSample(), PerToken(), PerSample(size="ids")])
@pytest.mark.parametrize("epochs", [1, 4])
def test_samples_that_nobody_counted_are_not_shown(
    tmp_path: Path, strategy: Any, epochs: int
) -> None:
    """Without a monitor only the first eight windows count their samples, and do so
    once where samples are what a micro-batch weighs."""
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=3 * epochs)
    _, fitted = train(AccumulationCallback(strategy), saves, epochs=epochs)
    window = windows_of(fitted).last_window
    assert window is not None
    if epochs == 1:
        assert float(window.samples) == len(SEQUENCES) - 2 * BATCH * WINDOW
    (saved,) = tmp_path.iterdir()
    mine = [AccumulationCallback(strategy), WindowMonitor(1)]
    found, _ = train(*mine, epochs=epochs + 1, resume=saved)
    column = 0 if isinstance(strategy, PerToken) else 1
    rest = totals(epochs + 1)[3 * epochs :]
    assert [row[0] for row in found] == [each[column] for each in rest]
    if epochs == 1 or column == 0:
        shown = [each[1] if epochs == 1 else None for each in rest]
        assert [row[1] for row in found] == shown


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
