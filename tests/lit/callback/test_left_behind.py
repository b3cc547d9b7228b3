"""Nothing of a `fit` stays behind: what is pickled or copied after it is small."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from tests.helpers import deviation, trainer, weights
from tests.lit.fronts import Plain, plain_token_loss, windows_of
from tests.lit.split.common import FIXED, START, Split, Table, loader_batches
from trainkit import (
    AccumulationCallback,
    AccumulationSchedule,
    BatchNormGuard,
    LRScaling,
    PerToken,
    WindowMonitor,
    read_effective_batch,
)
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.lit.front.mixin_callback import MixinCallback

pytestmark = pytest.mark.filterwarnings(
    "ignore:accumulation. an open window", "ignore:.*BatchNorm:UserWarning"
)

AUTO = MicroBatching("auto")
ROOM = 2048
"""Bytes by which a callback may grow: the numbers of a window, and little more."""

LARGE = 100_000


class Large:
    """Has many parameters, and a layer whose statistics a guard looks at."""

    error: BaseException | None = None

    def grow(self: Any) -> Any:
        self.net.more = nn.Linear(LARGE // 100, 100, dtype=torch.float64)
        self.net.norm = nn.BatchNorm1d(8, dtype=torch.float64)
        return self

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        if self.error is not None and self.global_step == 2:
            raise self.error
        self.net.norm(self.net.embed(batch["ids"]).flatten(0, 1))
        return plain_token_loss(self.net, batch)


class Own(Large, Split): ...


class Foreign(Large, Plain): ...


def of_callback(cut: MicroBatching | None = None) -> Any:
    return Foreign().grow(), [AccumulationCallback(PerToken(), micro_batching=cut)]


FRONTS: dict[str, Callable[[], tuple[Any, list[Any]]]] = {
    "split mixin": lambda: (Own().grow(), []),
    "auto mixin": lambda: (Own(cut=AUTO).grow(), []),
    "streamed mixin": lambda: (Own(cut=None).grow(), []),
    "split callback": lambda: of_callback(FIXED),
    "auto callback": lambda: of_callback(AUTO),
    "streamed callback": lambda: of_callback(),
}
ENDS: dict[str, dict[str, Any]] = {
    "end": {},
    "error": {"error": ValueError("mine")},
    "interrupt": {"error": KeyboardInterrupt()},
    "fast_dev_run": {"fast_dev_run": 2},
}
OTHERS: dict[str, Callable[[], Any]] = {
    "WindowMonitor": lambda: WindowMonitor(1),
    "AccumulationSchedule": lambda: AccumulationSchedule({0: 1, 30: 2}, unit="tokens"),
    "LRScaling": lambda: LRScaling("linear", reference_batch=4),
    **{
        f"BatchNormGuard {policy}": lambda policy=policy: BatchNormGuard(policy)  # type: ignore[misc]
        for policy in ("warn", "momentum", "recalibrate", "freeze", "renorm")
    },
}


def fit(
    front: str, *callbacks: Any, error: BaseException | None = None, **options: Any
) -> tuple[Any, pl.Trainer, list[int]]:
    """The module, the Trainer, and how large its callbacks were before."""
    module, mine = FRONTS[front]()
    module.error = error
    sizes = [len(pickle.dumps(each)) for each in (*mine, *callbacks)]
    fitted = trainer(1, callbacks=[*mine, *callbacks], max_epochs=2, **options)
    try:
        fitted.fit(module, loader_batches())
    except BaseException as raised:
        if raised is not error and not isinstance(raised, SystemExit):
            raise
    return module, fitted, sizes


@pytest.mark.parametrize(
    ("front", "end"),
    [
        *((front, "end") for front in FRONTS),
        ("split mixin", "error"),
        ("auto callback", "error"),
        ("streamed callback", "error"),
        ("streamed mixin", "interrupt"),
        ("split callback", "interrupt"),
        ("auto mixin", "fast_dev_run"),
        ("split callback", "fast_dev_run"),
    ],
)
def test_all_can_be_pickled_and_copied_after_a_fit(front: str, end: str) -> None:
    """As other packages' `model.save()` does, with module and Trainer."""
    module, fitted, before = fit(front, **ENDS[end])
    windows = windows_of(fitted)
    again = pickle.loads(pickle.dumps(fitted))
    assert windows_of(again).strategies == windows.strategies
    size = len(pickle.dumps(windows))
    assert size <= (before[0] if before else 900) + ROOM
    assert len(pickle.dumps(copy.deepcopy(windows))) <= size
    torch.save(module, io.BytesIO())
    assert len(pickle.dumps(fitted)) < len(pickle.dumps(module)) + 60_000


@pytest.mark.parametrize(
    ("name", "end"),
    [
        *((name, "end") for name in OTHERS),
        *((name, "error") for name in [*OTHERS][:3]),
        ("BatchNormGuard recalibrate", "error"),
    ],
)
def test_other_callbacks_are_small_after_a_fit(name: str, end: str) -> None:
    callback = OTHERS[name]()
    options = {"logger": Table(), "log_every_n_steps": 1, **ENDS[end]}
    _, fitted, before = fit("split callback", callback, **options)
    assert callback in fitted.callbacks  # type: ignore[attr-defined]
    assert len(pickle.dumps(callback)) <= before[1] + ROOM
    copy.deepcopy(callback)


class Copying(pl.Callback):
    """Copies the callback that divides, in every batch."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        windows = windows_of(trainer)
        self.sizes.append(len(pickle.dumps(windows)))
        copy.deepcopy(windows)


@pytest.mark.parametrize("front", FRONTS)
def test_they_can_be_copied_in_a_fit(front: str) -> None:
    copying = Copying()
    module, fitted, _ = fit(front, copying)
    assert max(copying.sizes) <= len(pickle.dumps(windows_of(fitted))) + ROOM
    assert weights(module).isfinite().all()


@pytest.mark.parametrize("front", FRONTS)
def test_the_module_is_free_when_its_trainer_is(front: str) -> None:
    """A callback that is kept, to be asked or to be given to the next Trainer."""
    module, fitted, _ = fit(front)
    kept, alive = windows_of(fitted), weakref.ref(module.net.more.weight)
    del fitted, module
    for name in ("log", "log_dict"):  # Lightning's own, on every callback
        vars(kept).pop(name, None)
    gc.collect()
    assert alive() is None


# ---- what stays ----------------------------------------------------------------------


WAYS: dict[str, Callable[[Any], Any]] = {
    "pickled": lambda each: pickle.loads(pickle.dumps(each)),
    "copied": copy.deepcopy,
    "itself": lambda each: each,
}


@pytest.mark.parametrize("front", FRONTS)
def test_what_users_read_after_a_fit_is_there(front: str) -> None:
    _, fitted, _ = fit(front)
    windows = windows_of(fitted)
    expected = windows.last_window
    assert expected is not None
    numbers = {
        "weight": float(expected.weight),
        "loss": float(expected.loss),
        "num_micro_batches": int(expected.num_micro_batches),
        "samples": float(expected.samples),
    }
    shown, batch = windows.micro_batch_size, read_effective_batch(fitted)
    for way, send in WAYS.items():
        sent = send(fitted)
        windows = windows_of(sent)
        last = windows.last_window
        assert last is not None
        assert {name: float(getattr(last, name)) for name in numbers} == numbers
        assert numbers["samples"] == 9
        assert windows.windows.keys() == {0}
        assert windows.num_skipped_steps == 0
        assert windows.micro_batch_size == shown
        assert (shown is not None) == front.startswith("auto")
        if way != "copied":
            assert read_effective_batch(sent) == batch


def test_skipped_steps_are_counted_after_a_fit() -> None:
    callback = AccumulationCallback(PerToken())
    callback._skipped_before = 3
    assert pickle.loads(pickle.dumps(callback)).num_skipped_steps == 3


@pytest.mark.parametrize("front", [f for f in FRONTS if "callback" in f])
def test_a_callback_that_was_sent_after_a_fit_trains_as_itself(front: str) -> None:
    _, fitted, _ = fit(front)
    itself = windows_of(fitted)
    for callback in (copy.deepcopy(WAYS["pickled"](itself)), itself):
        module = Plain()
        trainer(1, callbacks=[callback]).fit(module, loader_batches())
        assert deviation(module, uncut(), START) <= 1e-12


@cache
def uncut() -> Split:
    fresh = Split(cut=None)
    trainer(1).fit(fresh, loader_batches())
    return fresh


def test_a_checkpoint_saved_after_a_fit_is_as_one_saved_in_it(tmp_path: Any) -> None:
    for front in FRONTS:
        saver = ModelCheckpoint(tmp_path / front, filename="end", save_last=False)
        _, fitted, _ = fit(front, saver, enable_checkpointing=True)
        fitted.save_checkpoint(tmp_path / front / "after.ckpt")
        states = [
            torch.load(tmp_path / front / f"{name}.ckpt", weights_only=True)
            for name in ("end", "after")
        ]
        assert states[0]["trainkit"] == states[1]["trainkit"]
        key = "trainkit_micro_batching"
        assert states[0].get(key) == states[1].get(key)
        assert (key in states[1]) == front.startswith("auto")


def test_the_mixin_brings_its_callback_again() -> None:
    module, fitted, _ = fit("split mixin")
    again = pickle.loads(pickle.dumps(fitted))
    assert isinstance(windows_of(again), MixinCallback)
    fitted.fit_loop.max_epochs = 3
    fitted.fit(module, loader_batches())
    assert fitted.global_step == 9
