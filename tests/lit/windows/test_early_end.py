"""Where a window ends early, it is dropped with one message and leaks nothing."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Timer
from torch import Tensor

from tests.helpers import deviation, ragged_sequences, trainer, weights
from tests.lit.fronts import (
    WINDOW,
    Mixed,
    Plain,
    big_batch,
    micro_batches,
    windows_of,
)
from trainkit import AccumulationCallback, PerToken

SEQUENCES = ragged_sequences(38)
EPOCH = (5, 1, 8, 3, 2, 7, 1, 4, 6, 1)


@contextmanager
def one_message(held: int, why: str) -> Iterator[None]:
    """Exactly one message, which says how much the dropped window held."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield
    texts = [str(w.message) for w in said]
    batches = "micro-batches" if held > 1 else "micro-batch"
    assert [t for t in texts if t.startswith("accumulation:")] == [
        f"accumulation: an open window of {held} {batches} was dropped, since {why}; "
        f"no optimizer step was taken with it."
    ]


class Interrupting(pl.Callback):
    """Ends things at a batch of the first epoch, once."""

    def __init__(self, at: int, how: str) -> None:
        self.at = at
        self.how = how
        self.is_done = False

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.is_done or batch_idx != self.at:
            return
        self.is_done = True
        if self.how == "stop":
            trainer.should_stop = True
        elif self.how == "error":
            raise RuntimeError("the disk is full")
        elif self.how == "ctrl-c":
            raise KeyboardInterrupt


class SkippingRest(Mixed):
    """Ends its first epoch from `on_train_batch_start`."""

    def __init__(self, at: int) -> None:
        super().__init__(optimizer="sgd")
        self.at = at

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 0 and batch_idx == self.at else None


def first_window_then_epoch(optimizer: str = "sgd") -> Tensor:
    """One step with the first window, then a whole epoch."""
    sizes = (*EPOCH[:WINDOW], *EPOCH)
    run = big_batch(SEQUENCES[:17] + SEQUENCES, sizes, optimizer=optimizer, epochs=1)
    return run.end


START = weights(Plain())


@pytest.mark.parametrize("held", [1, 2, 3])
def test_epoch_after_minus_one_equals_fresh_epoch(held: int) -> None:
    """`on_train_batch_start` returns -1 inside the second window: the next epoch's
    first step holds nothing of it (transformers#22082, #22098)."""
    module = SkippingRest(WINDOW + held)
    with one_message(held, "the epoch ended inside it"):
        trainer(WINDOW).fit(module, micro_batches(SEQUENCES))
    assert deviation(module, first_window_then_epoch(), START) <= 1e-10


def test_epoch_after_minus_one_between_windows_says_nothing() -> None:
    module = SkippingRest(WINDOW)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "accumulation")
        trainer(WINDOW).fit(module, micro_batches(SEQUENCES))
    assert deviation(module, first_window_then_epoch(), START) <= 1e-10


@pytest.mark.parametrize("front", ["mixin", "callback"])
def test_should_stop_inside_a_window_keeps_the_steps_before(front: str) -> None:
    """The weights are those after the last whole window."""
    module = Mixed() if front == "mixin" else Plain()
    ours = [] if front == "mixin" else [AccumulationCallback(PerToken())]
    stopping = Interrupting(5, "stop")
    with one_message(2, "the epoch ended inside it"):
        trainer(WINDOW, callbacks=[stopping, *ours]).fit(
            module, micro_batches(SEQUENCES)
        )
    expected = big_batch(SEQUENCES[:17], EPOCH[:WINDOW], epochs=1).end
    assert deviation(module, expected, START) <= 1e-10


def test_max_time_inside_a_window_keeps_the_steps_before() -> None:
    module = Mixed()
    fitted = trainer(WINDOW, max_time=timedelta(days=1), callbacks=[Expiring(6)])
    with one_message(3, "the epoch ended inside it"):
        fitted.fit(module, micro_batches(SEQUENCES))
    expected = big_batch(SEQUENCES[:17], EPOCH[:WINDOW], epochs=1).end
    assert deviation(module, expected, START) <= 1e-10


class Expiring(pl.Callback):
    """Lets the Trainer's timer run out in a given batch."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self.at:
            timer = next(c for c in trainer.callbacks if isinstance(c, Timer))
            timer._duration = 0.0


def interrupted(fitted: pl.Trainer, module: Plain, how: str) -> None:
    """Fit until batch 5 of the first epoch, where it ends with an exception."""
    expected = RuntimeError if how == "error" else SystemExit
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(expected):
            fitted.fit(module, micro_batches(SEQUENCES))
    finally:
        signal.signal(signal.SIGINT, before)  # Lightning ignores it from then on


@pytest.mark.parametrize("same_trainer", [True, False])
@pytest.mark.parametrize("how", ["error", "ctrl-c"])
@pytest.mark.parametrize("front", ["mixin", "callback"])
def test_fit_after_an_exception_equals_fresh_fit(
    front: str, how: str, same_trainer: bool
) -> None:
    """Two micro-batches were waiting; the next fit begins as if they had not been."""
    module = Mixed() if front == "mixin" else Plain()
    ours = [] if front == "mixin" else [AccumulationCallback(PerToken())]
    callbacks = [Interrupting(5, how), *ours]
    fitted = trainer(WINDOW, callbacks=callbacks, max_epochs=1)
    name = {"error": "RuntimeError", "ctrl-c": "KeyboardInterrupt"}[how]
    with one_message(2, f"{name} ended training"):
        interrupted(fitted, module, how)
    if not same_trainer:
        fitted = trainer(WINDOW, callbacks=callbacks, max_epochs=1)
    fitted.fit(module, micro_batches(SEQUENCES))
    assert deviation(module, first_window_then_epoch(), START) <= 1e-10


@pytest.mark.parametrize("how", ["error", "stop"])
def test_step_hooks_are_gone_after_a_fit(how: str) -> None:
    """An optimizer that outlives the Trainer can be stepped in a loop of one's own."""
    module = Kept()
    fitted = trainer(WINDOW, callbacks=[Interrupting(5, how)])
    with one_message(2, "RuntimeError ended training" if how == "error" else ENDED):
        try:
            fitted.fit(module, micro_batches(SEQUENCES))
        except RuntimeError:
            pass
    assert module.kept is not None
    assert not module.kept._optimizer_step_pre_hooks
    assert not module.kept._optimizer_step_post_hooks


ENDED = "the epoch ended inside it"


class Kept(Mixed):
    """Remembers its optimizer."""

    kept: Any = None

    def configure_optimizers(self) -> Any:
        self.kept = super().configure_optimizers()
        return self.kept


@pytest.mark.parametrize("front", ["mixin", "callback"])
def test_second_fit_equals_fresh_fit(front: str) -> None:
    """The same Trainer and module again, with another optimizer state."""
    module = Mixed(optimizer="adamw") if front == "mixin" else Plain(optimizer="adamw")
    ours = [] if front == "mixin" else [AccumulationCallback(PerToken())]
    fitted = trainer(WINDOW, callbacks=ours, max_epochs=1)
    fitted.fit(module, micro_batches(SEQUENCES))
    between = Mixed(optimizer="adamw")
    between.load_state_dict(module.state_dict())
    fitted.fit_loop.max_epochs = 2
    fitted.fit(module, micro_batches(SEQUENCES))
    fresh = trainer(WINDOW, max_epochs=1)
    fresh.fit(between, micro_batches(SEQUENCES))
    assert deviation(module, between, START) <= 1e-12
    window = windows_of(fitted).last_window
    assert window is not None
    assert int(window.num_micro_batches) == 2


class ShorterThanItSays(list):  # type: ignore[type-arg]
    """A loader that claims more batches than it yields."""

    def __len__(self) -> int:
        return super().__len__() + 3


def test_loader_shorter_than_its_length_drops_what_is_left() -> None:
    """Lightning learns too late that the epoch is over, and takes no step."""
    batches = ShorterThanItSays(micro_batches(SEQUENCES))
    module = Mixed()
    with one_message(2, ENDED):
        trainer(WINDOW, max_epochs=1).fit(module, batches)
    expected = big_batch(SEQUENCES[:31], EPOCH[:8], epochs=1).end
    assert deviation(module, expected, START) <= 1e-10
