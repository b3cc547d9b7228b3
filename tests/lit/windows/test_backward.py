"""A backward pass is the same with hooks around it, without any, and by the module's
own `backward`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

from tests.lit.fronts import assert_big_batch, fit
from tests.zoo.modules import Plain, hooked
from trainkit import Accumulator, MicroBatching, PerSample

SEEN: list[str] = []


def noted(name: str) -> Callable[..., None]:
    return lambda *args: SEEN.append(name)


def own_backward(self: Any, loss: Any, *args: Any, **kwargs: Any) -> None:
    SEEN.append("backward")
    loss.backward(*args, **kwargs)


def listening() -> list[Any]:
    names = "on_before_backward", "on_after_backward"
    return [LambdaCallback(**{name: noted(name) for name in names})]


WAYS: dict[str, tuple[Any, Callable[[], list[Any]], set[str]]] = {
    "nobody": (Plain, list, set()),
    "a callback": (Plain, listening, {"on_before_backward", "on_after_backward"}),
    "the module": (
        hooked(Plain, on_after_backward=noted("module")), list, {"module"},
    ),
    "its own backward": (hooked(Plain, backward=own_backward), list, {"backward"}),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_windows_equal_the_big_batch_whoever_listens(way: str) -> None:
    kind, callbacks, names = WAYS[way]
    SEEN.clear()
    assert_big_batch(kind, callbacks=callbacks)
    assert set(SEEN) == names


class Late(pl.Callback):
    """Brings a listener once training has begun."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.callbacks += listening()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.on_after_backward = noted("module")


@pytest.mark.parametrize(("cut", "window"), [(None, 4), (MicroBatching(size=3), 1)])
def test_hooks_that_come_late_are_called(cut: Any, window: int) -> None:
    SEEN.clear()
    fit("callback", Plain, Late(), made={"cut": cut}, window=window, max_epochs=1)
    names = {"on_before_backward", "on_after_backward", "module"}
    assert {name: SEEN.count(name) > 1 for name in names} == dict.fromkeys(names, True)


@pytest.mark.parametrize("weights", [(3, 1), (torch.tensor(3.0), torch.tensor(1))])
@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_pass_begins_with_the_gradient_that_a_hook_would_make(
    weights: Any, told: bool, shape: Any
) -> None:
    """`backward()` without an argument of its own, and with one, which needs a hook;
    numbers and tensors as weights, losses of no dimension and of one."""
    found = []
    for own in (None, torch.Tensor.backward):
        parameter = torch.ones(2, dtype=torch.float64, requires_grad=True)
        accumulator = Accumulator(PerSample())
        if told:
            accumulator.expect(weights={"": weights})
        for factor, weight in zip((2.0, 7.0), weights, strict=True):
            loss = (factor * parameter).mean().reshape(shape)
            accumulator.backward(loss, weight=weight, backward=own)
        stats = accumulator.finish([parameter])
        assert parameter.grad is not None
        found.append((parameter.grad.tolist(), float(stats.loss)))
    assert found[0] == found[1] == ([1.625, 1.625], 3.25)
