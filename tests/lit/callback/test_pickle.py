"""Callbacks can be sent to another process, as `ddp_spawn` sends them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from tests.lit.rates.scaled import REFERENCE, Scheduled, adamw, fit
from trainkit import (
    AccumulationCallback,
    AccumulationSchedule,
    BatchNormGuard,
    LRScaling,
    Uniform,
    WindowMonitor,
)

CALLBACKS: dict[str, Callable[[], Any]] = {
    "AccumulationCallback": lambda: AccumulationCallback(Uniform()),
    "AccumulationSchedule": lambda: AccumulationSchedule({0: 2, 1: 4}),
    "BatchNormGuard": BatchNormGuard,
    "WindowMonitor": lambda: WindowMonitor(every_n_steps=2),
    "LRScaling": lambda: LRScaling("linear", reference_batch=REFERENCE),
    "LRScaling of moments": lambda: LRScaling(
        "adam-sde", reference_batch=REFERENCE, weight_decay="sqrt", warmup_steps=3
    ),
    "LRScaling of half-life": lambda: LRScaling("half-life", reference_batch=REFERENCE),
}
WAYS = [lambda each: pickle.loads(pickle.dumps(each)), copy.deepcopy]


@pytest.mark.parametrize("name", CALLBACKS)
def test_callback_that_was_sent_trains_as_itself(name: str) -> None:
    """Sent before a fit; LRScaling after one as well. What one way loses, no other
    brings back: they follow one another."""
    callback = CALLBACKS[name]()
    sent = [in_every_way(callback)]
    curve = train(name, callback).curve
    if "LRScaling" in name:
        sent.append(in_every_way(callback))
        assert sent[-1].k == callback.k
    for each in sent:
        assert train(name, each).curve == curve


def in_every_way(callback: Any) -> Any:
    for way in WAYS:
        callback = way(callback)
    return callback


def train(name: str, callback: Any) -> Any:
    windows = (
        [] if name == "AccumulationCallback" else [AccumulationCallback(Uniform())]
    )
    size = 1 if name == "AccumulationSchedule" else 2
    module = Scheduled("CosineAnnealingLR", optimizer=adamw)
    return fit(module, callback, *windows, window=size)


@pytest.mark.parametrize("way", WAYS, ids=["pickled", "copied"])
def test_optimizer_that_stands_scaled_can_be_sent(way: Any) -> None:
    scaling = LRScaling("linear", reference_batch=REFERENCE)
    module = fit(Scheduled(None), scaling)
    sent = way(module.optimizers().optimizer)
    assert [group["lr"] for group in sent.param_groups] == module.curve[-1][:2]
