"""Hooks that see the gradients of one micro-batch are named before training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from tests.helpers import NAIVE, TOLERANCE, deviation, trainer, weights
from tests.lit.batch_norm.fits import ConvModule, batches
from trainkit import (
    AccumulationCallback,
    MicroBatching,
    PerSample,
    PlainComparison,
    WindowMonitor,
)

Hook = Callable[[nn.Module], Any]


def linear() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 3)).double()


class Plain(ConvModule):
    """Nothing in it but a linear layer."""

    def __init__(self, hook: Hook | None = None) -> None:
        super().__init__(linear)
        if hook is not None:
            hook(self.net[1])


class Clipping(Plain):
    def on_after_backward(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.01)


class ClippingCallback(Callback):
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        nn.utils.clip_grad_norm_(pl_module.parameters(), 0.01)


def clip(layer: Any) -> Any:
    return layer.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


def mask(layer: Any) -> Any:
    return layer.weight.register_hook(lambda gradient: gradient * 0.5)


def look(layer: Any) -> Any:
    return layer.weight.register_post_accumulate_grad_hook(lambda parameter: None)


def fit(
    module: Plain, *callbacks: Any, size: int | None = None, accumulate: int = 3
) -> Plain:
    """Windows of twelve rows: three loader batches of four, or one that is cut."""
    split = None if size is None else MicroBatching(size=size)
    ours = AccumulationCallback(PerSample(), micro_batching=split)
    data = batches(rows=24, batch_size=4 if split is None else 12)
    accumulate = accumulate if split is None else 1
    trainer(accumulate, callbacks=[ours, *callbacks]).fit(module, data)
    return module


def big_batch(module: Plain, *callbacks: Any) -> Plain:
    trainer(1, callbacks=[*callbacks]).fit(module, batches(rows=24, batch_size=12))
    return module


def said(capsys: Any) -> list[str]:
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("trainkit | step: ") for line in lines)
    return [line for line in lines if line.startswith("trainkit | gradient hooks: ")]


@pytest.mark.parametrize("size", [None, 4], ids=["streamed", "split"])
@pytest.mark.parametrize(
    ("make", "callbacks", "name"),
    [
        (Clipping, [], "on_after_backward of Clipping"),
        (Plain, [ClippingCallback], "on_after_backward of ClippingCallback"),
        (lambda: Plain(clip), [], "hooks of net.1.weight"),
    ],
    ids=["module", "callback", "parameter"],
)
def test_a_hook_that_clips_is_named_and_is_not_the_big_batchs(
    make: Any, callbacks: list[Any], name: str, size: int | None, capsys: Any
) -> None:
    ours = fit(make(), *(each() for each in callbacks), size=size)
    assert said(capsys) == [
        f"trainkit | gradient hooks: {name}: they run once for each micro-batch, "
        f"before the window's gradient is complete; what clips or replaces gradients "
        f"belongs in on_before_optimizer_step"
    ]
    reference = big_batch(make(), *(each() for each in callbacks))
    assert deviation(ours, reference, weights(make())) > NAIVE


@pytest.mark.parametrize("size", [None, 4], ids=["streamed", "split"])
@pytest.mark.parametrize("hook", [mask, look])
def test_a_hook_that_is_linear_is_named_and_exact(
    hook: Hook, size: int | None, capsys: Any
) -> None:
    ours = fit(Plain(hook), size=size)
    assert len(said(capsys)) == 1
    start = weights(Plain())
    assert deviation(ours, big_batch(Plain(hook)), start) < TOLERANCE[torch.float64]
    if hook is mask:
        assert deviation(ours, big_batch(Plain()), start) > NAIVE


def test_both_kinds_are_in_one_row(capsys: Any) -> None:
    fit(Clipping(clip))
    (row,) = said(capsys)
    assert "on_after_backward of Clipping, hooks of net.1.weight: they run" in row


def test_nothing_is_said_where_nobody_looks(capsys: Any) -> None:
    fit(Plain(), WindowMonitor(every_n_steps=1), PlainComparison())
    assert said(capsys) == []


def test_nothing_is_said_of_a_hook_that_was_removed(capsys: Any) -> None:
    fit(Plain(lambda layer: clip(layer).remove()))
    assert said(capsys) == []


def test_nothing_is_said_where_each_window_is_one_micro_batch(capsys: Any) -> None:
    fit(Clipping(clip), accumulate=1)
    assert said(capsys) == []
