"""Which micro-batches make a window: schedules, limits, early ends, None."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import cycle
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LambdaCallback
from torch.utils.data import DataLoader

from tests.helpers import NAIVE, OPTIMIZERS, TokenNet, deviation, pad, trainer, weights
from tests.lit.fronts import (
    RAGGED,
    SEQUENCES,
    WINDOW,
    batches_of,
    cut,
    fit,
    ragged,
    windows_of,
)
from tests.zoo.callbacks import Ending, told
from tests.zoo.modules import Plain, Stream, hooked, on_front, plain_token_loss
from trainkit.lit._compat import leaves_fit

ALL = range(len(RAGGED))
PARTS = cut(SEQUENCES, RAGGED)
Windows = list[list[int]]


def of(window: int, kept: Sequence[int] = ALL) -> Windows:
    """An epoch's windows of so many micro-batches, of which only some are kept."""
    starts = range(0, len(ALL), window)
    return [[k for k in ALL[start : start + window] if k in kept] for start in starts]


def stepped(windows: Windows, optimizer: str = "sgd") -> torch.Tensor:
    """The reference: the weights after a step with each of these in one batch."""
    net = TokenNet(dtype=torch.float64)
    stepper = OPTIMIZERS[optimizer](net.parameters())
    for window in windows:
        stepper.zero_grad()
        samples = [SEQUENCES[index] for k in window for index in PARTS[k]]
        if samples:
            plain_token_loss(net, pad(samples)).backward()
        stepper.step()
    return weights(net)


class Case:
    """A training, the windows that it must take, and what must be said meanwhile.

    Args:
        is_off: whether plain Lightning ends elsewhere.
        **how: arguments of `fit`.
    """

    def __init__(
        self, windows: Windows, said: str = "", *, is_off: bool = True, **how: Any
    ) -> None:
        self.windows, self.said, self.is_off = windows, said, is_off
        self.kind: type[Plain] = how.pop("kind", Plain)
        self.callbacks: Callable[[], list[Any]] = how.pop("callbacks", list)
        self.optimizer: str = how.pop("optimizer", "sgd")
        self.strategy: Any = how.pop("strategy", None)
        self.how = how


def without(*skipped: int) -> type[Plain]:
    """Returns None for some micro-batches, and of the others a dict."""

    def training_step(self: Plain, batch: Any, batch_idx: int) -> Any:
        if batch_idx in skipped:
            return None
        return {"loss": self.loss_of(batch), "extra": "kept"}

    return hooked(Plain, training_step=training_step)


def ends_epoch_at(batch: int) -> type[Plain]:
    """Ends its first epoch from `on_train_batch_start`."""

    def on_train_batch_start(self: Plain, _: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 0 and batch_idx == batch else None

    return hooked(Plain, on_train_batch_start=on_train_batch_start)


def setting(length: int) -> Callable[[], list[Any]]:
    """Sets the window's length before the third batch, as some schedules do."""

    def hook(trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            trainer.accumulate_grad_batches = length

    return lambda: [LambdaCallback(on_train_batch_start=hook)]


class ShorterThanItSays(list[Any]):
    def __len__(self) -> int:
        return super().__len__() + 3


def stream(*left_out: int) -> Callable[[Any], Any]:
    """Batches of unknown number, some of them None."""

    def batches(sizes: Sequence[int]) -> Any:
        given = enumerate(batches_of(SEQUENCES, sizes))
        rest = [None if index in left_out else batch for index, batch in given]
        return DataLoader(Stream(rest), batch_size=None)

    return batches


def dropped(held: int, why: str = "the epoch ended inside it") -> str:
    batches = "micro-batches" if held > 1 else "micro-batch"
    return (
        f"accumulation: an open window of {held} {batches} was dropped, since {why}; "
        f"no optimizer step was taken with it."
    )


ONCE: dict[str, Any] = {"max_epochs": 1}
CASES: dict[str, Case] = {
    # Also one that divides the epoch exactly (transformers#37777), and N = 1.
    **{f"of {n}": Case(of(n) * 2, is_off=n > 1, window=n) for n in (1, 3, 5, 10)},
    # lightning#21808, pet#25, speculators#859
    "longer than an epoch": Case(of(10) * 2, window=64),
    **{
        f"a stream in windows of {n}": Case(
            of(n) * 2, optimizer="adamw", window=n, batches=stream()
        )
        for n in (3, 100)
    },
    "Lightning's own schedule": Case(
        [*of(2), *of(4)],
        callbacks=lambda: [GradientAccumulationScheduler({0: 2, 1: 4})],
        optimizer="momentum",
        window=1,
    ),
    # pytorch-lightning#17207: validation comes between micro-batches of a window.
    **{
        f"validation every {n}": Case(
            of(WINDOW) * 2,
            kind=hooked(Plain, validation_step=lambda self, batch, _: None),
            validation=ragged([4]),
            val_check_interval=n,
        )
        for n in (3, 0.3)
    },
    **{
        f"limited to {n}": Case(of(WINDOW, range(7))[:2], limit_train_batches=n, **ONCE)
        for n in (7, 0.7)
    },
    "limited to 3": Case([[0, 1, 2]], limit_train_batches=3, **ONCE),
    "fast_dev_run": Case([[0, 1, 2]], fast_dev_run=3),
    # Windows are counted, not micro-batches; the second epoch starts afresh.
    **{f"{n} steps": Case((of(WINDOW) * 2)[:n], max_steps=n) for n in (2, 4)},
    # None for the first, a middle, the last of a window, for a whole one, for many.
    **{
        f"without {skipped}": Case(
            of(WINDOW, [k for k in ALL if k not in skipped]),
            kind=without(*skipped),
            optimizer="momentum",
            **ONCE,
        )
        for skipped in ((0, 3, 9), (1, 2), (4, 5, 6, 7))
    },
    "without any": Case([], kind=without(*ALL), is_off=False, **ONCE),
    # YOLO#225: Lightning steps after batches 0-1, then 2-3 without having zeroed the
    # gradients of the first step, since 2 % 4 != 0.
    "lengthened in mid-epoch": Case(
        [[0, 1], [2, 3], [4, 5, 6, 7]],
        callbacks=setting(4),
        window=2,
        limit_train_batches=8,
        **ONCE,
    ),
    "shortened inside a window": Case(
        [[2, 3], [4, 5], [6, 7]],
        dropped(
            2,
            "optimizer_step left its step out, or accumulate_grad_batches has changed",
        ),
        callbacks=setting(2),
        window=3,
        limit_train_batches=8,
        **ONCE,
    ),
    # Lightning zeroes gradients with a window's first batch only, which is None.
    "None from the loader": Case(
        of(WINDOW, [k for k in ALL if k != 4]), batches=stream(4), **ONCE
    ),
    # `on_train_batch_start` returns -1 in the second window: the next epoch's first
    # step holds nothing of it (transformers#22082, #22098).
    **{
        f"-1 after {held}": Case(
            [*of(WINDOW)[:1], *of(WINDOW)],
            dropped(held) if held else "",
            kind=ends_epoch_at(WINDOW + held),
        )
        for held in (0, 3)
    },
    "should_stop": Case(of(WINDOW)[:1], dropped(2), callbacks=lambda: [Ending(5)]),
    # Lightning learns too late that the epoch is over, and takes no step.
    "a loader shorter than it says": Case(
        of(WINDOW)[:2],
        dropped(2),
        batches=lambda sizes: ShorterThanItSays(ragged(sizes)),
        **ONCE,
    ),
}
START = weights(Plain())


def run(front: str, case: Case) -> Any:
    made = {"optimizer": case.optimizer}
    made |= {} if front == "plain" else {"strategy": case.strategy}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*yielded None")
        warnings.filterwarnings("ignore", "`training_step` returned `None`")
        return fit(front, case.kind, *case.callbacks(), made=made, **case.how)


@pytest.mark.parametrize(
    ("name", "front"), [*zip(CASES, cycle(["mixin", "callback"]), strict=False)]
)
def test_windows_are_big_batches_of_these_micro_batches(name: str, front: str) -> None:
    """With exactly these messages; plain Lightning, the control, is off."""
    case = CASES[name]
    with told("accumul") as said:
        module = run(front, case).lightning_module
    if not case.windows:
        assert torch.equal(weights(module), START)
        return
    assert said == [case.said] * bool(case.said)
    expected = stepped(case.windows, case.optimizer)
    assert deviation(module, expected, START) <= 1e-10
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = run("plain", case).lightning_module
    assert (deviation(plain, expected, START) > NAIVE) is case.is_off


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")
def test_loss_of_window_equals_true_mean_undivided() -> None:
    """pytorch-lightning#13243, #2569: what callbacks are shown is the micro-batch's
    loss over N; the window's is the mean over what it holds."""
    fitted = fit("mixin", without(1), limit_train_batches=4, max_epochs=1)
    window = windows_of(fitted).last_window
    batch = pad([SEQUENCES[index] for k in (0, 2, 3) for index in PARTS[k]])
    assert window is not None
    expected = plain_token_loss(TokenNet(dtype=torch.float64), batch)
    torch.testing.assert_close(window.loss, expected)
    assert int(window.num_micro_batches) == 3
    assert int(window.weight) == int((batch["labels"] != -100).sum())


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


@pytest.mark.parametrize(
    ("front", "how", "same_trainer"),
    [
        ("mixin", "error", True),
        ("callback", "ctrl-c", True),
        ("callback", "error", False),
        ("plain", "error", True),
    ],
)
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
