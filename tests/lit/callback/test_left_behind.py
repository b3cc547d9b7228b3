"""Nothing of a `fit` stays behind: what is pickled or copied after it is small."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from tests.helpers import deviation, trainer, weights
from tests.lit.fronts import windows_of
from tests.lit.rates.scaled import REFERENCE, Scheduled, adamw
from tests.lit.rates.scaled import fit as fit_scaled
from tests.lit.split.common import START, loader_batches
from tests.zoo.callbacks import SENT, Table
from tests.zoo.modules import Mixed, Plain
from trainkit import (
    AccumulationCallback,
    AccumulationSchedule,
    BatchNormGuard,
    LRScaling,
    MicroBatching,
    PerToken,
    Uniform,
    WindowMonitor,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:accumulation. an open window", "ignore:.*BatchNorm:UserWarning"
)
FIXED, AUTO = MicroBatching(size=4), MicroBatching("auto")
ROOM = 2048
"""Bytes by which a callback may grow: the numbers of a window, and little more."""


class Large(Plain):
    """Has many parameters, and a layer whose statistics a guard looks at."""

    error: BaseException | None = None

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self.net.more = nn.Linear(1000, 100, dtype=torch.float64)
        self.net.norm = nn.BatchNorm1d(8, dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.error is not None and self.global_step == 2:
            raise self.error
        self.net.norm(self.net.embed(batch["ids"]).flatten(0, 1))  # type: ignore[operator]
        return self.loss_of(batch)


class MixedLarge(Mixed, Large): ...


FRONTS: dict[str, Any] = {
    "split mixin": ("mixin", FIXED),
    "split callback": ("callback", FIXED),
    "auto callback": ("callback", AUTO),
    "streamed callback": ("callback", None),
}
ENDS: dict[str, dict[str, Any]] = {
    "end": {},
    "error": {"error": ValueError("mine")},
    "interrupt": {"error": KeyboardInterrupt()},
    "fast_dev_run": {"fast_dev_run": 2},
}
POLICIES = ("warn", "momentum", "recalibrate", "freeze")
OTHERS: dict[str, Callable[[], Any]] = {
    "WindowMonitor": lambda: WindowMonitor(1),
    "AccumulationSchedule": lambda: AccumulationSchedule({0: 1, 30: 2}, unit="tokens"),
    "LRScaling": lambda: LRScaling("linear", reference_batch=4, micro_batch=8),
    **{f"Guard {each}": (lambda each=each: BatchNormGuard(each)) for each in POLICIES},
}
SENT_WITHIN = ("WindowMonitor", "AccumulationSchedule", "LRScaling", "Guard momentum")


def fit(front: str, *callbacks: Any, error: Any = None, **options: Any) -> Any:
    """The module, the Trainer, and how large its callbacks were before."""
    kind, cut = FRONTS[front]
    mine = []
    if kind == "callback":
        mine = [AccumulationCallback(PerToken(), micro_batching=cut)]
    module = Large() if mine else MixedLarge(cut=cut)
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
        ("streamed callback", "interrupt"),
        ("auto callback", "fast_dev_run"),
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
    [*((name, "end") for name in OTHERS), ("Guard recalibrate", "error")],
)
def test_other_callbacks_are_small_after_a_fit(name: str, end: str) -> None:
    callback = OTHERS[name]()
    options = {"logger": Table(), "log_every_n_steps": 1, **ENDS[end]}
    _, fitted, before = fit("split callback", callback, **options)
    assert callback in fitted.callbacks
    assert len(pickle.dumps(callback)) <= before[1] + ROOM
    copy.deepcopy(callback)


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


class Copying(pl.Callback):
    """Copies the callback that divides, in every batch."""

    largest = 0

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        copied = copy.deepcopy(windows_of(trainer))
        self.largest = max(self.largest, len(pickle.dumps(copied)))


@pytest.mark.parametrize("front", FRONTS)
def test_what_users_read_after_a_fit_is_there(front: str) -> None:
    """Copies, which may be made within the `fit`, are small, and begin anew."""
    copying = Copying()
    module, fitted, _ = fit(front, copying)
    assert weights(module).isfinite().all()
    windows = windows_of(fitted)
    assert 0 < copying.largest <= len(pickle.dumps(windows)) + ROOM
    names = ("weight", "loss", "num_micro_batches", "samples")
    numbers = [float(getattr(windows.last_window, name)) for name in names]
    # In streamed windows samples are counted where somebody asks for them.
    assert numbers[-1] == (0 if front.startswith("streamed") else 9)
    assert windows.num_skipped_steps == 0
    assert (windows.micro_batch_size is not None) == front.startswith("auto")
    for send in SENT.values():
        found = windows_of(send(fitted))
        assert (found.last_window, found.micro_batch_size) == (None, None)
        assert found.ledger.of() is None
    if "callback" in front:  # it trains the next module, sent or not
        uncut = Mixed()
        trainer(1).fit(uncut, loader_batches())
        for callback in (copy.deepcopy(SENT["pickled"](windows)), windows):
            again = Plain()
            trainer(1, callbacks=[callback]).fit(again, loader_batches())
            assert deviation(again, uncut, START) <= 1e-12


class Sending(pl.Callback):
    """Sends the Trainer, as a loader does to workers that it spawns, if its
    `collate_fn` is a method of the data module."""

    sent: ClassVar[list[Any]] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.sent[:] = [SENT["pickled"](trainer)]


@pytest.mark.parametrize("front", FRONTS)
def test_all_can_be_sent_within_a_fit(front: str) -> None:
    others = [make() for name, make in OTHERS.items() if name in SENT_WITHIN]
    _, fitted, _ = fit(front, Sending(), *others, logger=Table(), log_every_n_steps=1)
    found = Sending.sent.pop()
    assert [*map(type, found.callbacks)] == [*map(type, fitted.callbacks)]
    assert windows_of(found).last_window is None


@pytest.mark.parametrize("front", FRONTS)
def test_a_checkpoint_saved_after_a_fit_is_as_one_saved_in_it(
    front: str, tmp_path: Any
) -> None:
    saver = ModelCheckpoint(tmp_path, filename="end", save_last=False)
    _, fitted, _ = fit(front, saver, enable_checkpointing=True)
    fitted.save_checkpoint(tmp_path / "after.ckpt")
    first, second = (
        torch.load(tmp_path / f"{name}.ckpt", weights_only=True)
        for name in ("end", "after")
    )
    assert first["trainkit"] == second["trainkit"]
    key = "trainkit_micro_batching"
    assert first.get(key) == second.get(key)
    assert (key in second) == front.startswith("auto")


# ---- sent to another process, as `ddp_spawn` sends them ------------------------------


CALLBACKS: dict[str, Callable[[], Any]] = {
    "AccumulationCallback": lambda: AccumulationCallback(Uniform()),
    "AccumulationSchedule": lambda: AccumulationSchedule({0: 2, 1: 4}),
    "BatchNormGuard": BatchNormGuard,
    "WindowMonitor": lambda: WindowMonitor(every_n_steps=2),
    "LRScaling of moments": lambda: LRScaling(
        "adam-sde", reference_batch=REFERENCE, weight_decay="sqrt", warmup_steps=3
    ),
}


def in_every_way(callback: Any) -> Any:
    """What one way loses, no other brings back: they follow one another."""
    return SENT["copied"](SENT["pickled"](callback))


def trained(name: str, callback: Any) -> Any:
    windows = [AccumulationCallback(Uniform())] * (name != "AccumulationCallback")
    size = 1 if name == "AccumulationSchedule" else 2
    module = Scheduled("CosineAnnealingLR", optimizer=adamw)
    return fit_scaled(module, callback, *windows, window=size)


@pytest.mark.parametrize("name", CALLBACKS)
def test_callback_that_was_sent_trains_as_itself(name: str) -> None:
    """Sent before a fit and after one."""
    callback = CALLBACKS[name]()
    sent = [in_every_way(callback)]
    curve = trained(name, callback).curve
    for each in (*sent, in_every_way(callback)):
        assert trained(name, each).curve == curve


@pytest.mark.parametrize("name", CALLBACKS)
def test_error_of_another_process_is_not_hidden_by_one_here(name: str) -> None:
    """Lightning hands it on to the process that started the others, and there the
    module has no Trainer."""
    CALLBACKS[name]().on_exception(trainer(), pl.LightningModule(), ValueError())


@pytest.mark.parametrize("way", SENT)
def test_optimizer_that_stands_scaled_can_be_sent(way: str) -> None:
    scaling = LRScaling("linear", reference_batch=REFERENCE)
    module = fit_scaled(Scheduled(None), scaling)
    sent = SENT[way](module.optimizers().optimizer)
    assert [group["lr"] for group in sent.param_groups] == module.curve[-1][:2]
