"""A `fit` that ends leaves nothing to the next one, inside a window or not."""

from __future__ import annotations

import signal
from contextlib import suppress
from typing import Any

import pytest
from lightning.pytorch.callbacks import LambdaCallback

from tests.helpers import NAIVE, OPTIMIZERS, deviation, trainer, weights
from tests.lit.fronts import RAGGED, WINDOW, fit, ragged, windows_of
from tests.lit.windows.test_windows import dropped, of, stepped
from tests.recording import Ending, told
from tests.zoo import Plain, on_front
from trainkit.lit._compat import leaves_fit

START = weights(Plain())
ENDS: dict[str, tuple[Any, str]] = {
    "error": (RuntimeError("the disk is full"), "RuntimeError ended training"),
    "ctrl-c": (KeyboardInterrupt(), "KeyboardInterrupt ended training"),
    "stop": (None, "the epoch ended inside it"),
}


def end(fitted: Any, module: Any, how: str, *, is_ours: bool = True) -> None:
    """Fit until batch 5 of the first epoch, with two micro-batches in a window."""
    before = signal.getsignal(signal.SIGINT)
    fitted.callbacks = [*fitted.callbacks, Ending(5, ENDS[how][0])]
    with told("accumulation") as said, suppress(RuntimeError, SystemExit):
        fitted.fit(module, ragged(RAGGED))
    signal.signal(signal.SIGINT, before)  # Lightning ignores it from then on
    assert said == ([dropped(2, ENDS[how][1])] if is_ours else [])


@pytest.mark.parametrize("same_trainer", [True, False])
@pytest.mark.parametrize("how", ["error", "ctrl-c"])
@pytest.mark.parametrize("front", ["mixin", "callback", "plain"])
def test_fit_after_an_exception_equals_fresh_fit(
    front: str, how: str, same_trainer: bool
) -> None:
    """Two micro-batches were waiting; the next fit begins as if they had not been."""
    module, ours = on_front(front)
    fitted: Any = trainer(WINDOW, callbacks=ours, max_epochs=1)
    end(fitted, module, how, is_ours=front != "plain")
    if not same_trainer:
        fitted = trainer(WINDOW, callbacks=ours, max_epochs=1)
    fitted.fit(module, ragged(RAGGED))
    off = deviation(module, stepped([*of(WINDOW)[:1], *of(WINDOW)]), START)
    assert off > NAIVE if front == "plain" else off <= 1e-10


@pytest.mark.parametrize("front", ["mixin", "callback"])
def test_second_fit_equals_fresh_fit(front: str) -> None:
    """The same Trainer and module again, with another optimizer state."""
    fitted = fit(front, max_epochs=1, made={"optimizer": "adamw"})
    between, ours = on_front(front, optimizer="adamw")
    between.load_state_dict(fitted.lightning_module.state_dict())
    fitted.fit_loop.max_epochs = 2
    fitted.fit(fitted.lightning_module, ragged(RAGGED))
    fresh = trainer(WINDOW, max_epochs=1, callbacks=ours)
    fresh.fit(between, ragged(RAGGED))
    assert deviation(fitted.lightning_module, between, START) <= 1e-12
    window = windows_of(fitted).last_window
    assert window is not None
    assert int(window.num_micro_batches) == 2


def leave(trainer: Any, module: Any) -> None:
    """As Lightning's finders leave `fit`: no hook but `teardown` hears of it."""
    raise leaves_fit(trainer)


@pytest.mark.parametrize("how", ["error", "stop", "left", "whole"])
def test_optimizer_and_strategy_are_as_before_afterwards(how: str) -> None:
    """An optimizer that outlives the Trainer can be stepped in a loop of one's own."""
    kept: list[Any] = []

    def make(parameters: Any) -> Any:
        kept.append(OPTIMIZERS["sgd"](parameters))
        return kept[0]

    module, ours = on_front("callback", optimizer=make)
    leaves = [LambdaCallback(on_train_epoch_start=leave)] if how == "left" else []
    fitted: Any = trainer(WINDOW, callbacks=[*ours, *leaves])
    if how in ENDS:
        end(fitted, module, how)
    else:
        fitted.fit(module, ragged(RAGGED))
    assert not kept[0]._optimizer_step_pre_hooks
    assert not kept[0]._optimizer_step_post_hooks
    assert "training_step" not in vars(fitted.strategy)
