"""Everybody sees the exact gradient: other callbacks, the module's hooks, clipping."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor

from tests.helpers import OPTIMIZERS, TokenNet, gradients, trainer
from tests.lit.fronts import (
    RAGGED,
    SEQUENCES,
    WINDOW,
    Clip,
    batches_of,
    clip_,
    clip_options,
    fit,
    merged,
    plain_token_loss,
    ragged,
)
from tests.recording import Gradients
from tests.zoo import Plain, hooked, on_front


def exact_gradients(clip: Clip = None) -> tuple[list[Tensor], list[Tensor]]:
    """The big batch's gradient in each step of an epoch, before and after clipping."""
    net = TokenNet(dtype=torch.float64)
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    before, after = [], []
    for batch in batches_of(SEQUENCES, merged(RAGGED)):
        optimizer.zero_grad()
        plain_token_loss(net, batch).backward()
        before.append(gradients(net).clone())
        clip_(net, clip)
        after.append(gradients(net).clone())
        optimizer.step()
    return before, after


class LastGradients(Gradients, Checkpoint):
    """One that Lightning sorts behind all others."""


def are_same(seen: list[Tensor], expected: list[Tensor]) -> bool:
    assert len(seen) == len(expected)
    pairs = zip(seen, expected, strict=True)
    return all(torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in pairs)


@pytest.mark.parametrize("reader", [Gradients, LastGradients])
@pytest.mark.parametrize("front", ["mixin", "before", "after", "plain"])
def test_gradient_seen_by_any_callback_equals_big_batch(
    front: str, reader: type[Gradients]
) -> None:
    """Wherever it stands in the list (keras#20241's smaller last batch included), and
    the others keep their order. Plain Lightning shows another."""
    module, ours = on_front(
        {"before": "callback", "after": "callback"}.get(front, front)
    )
    first, second = reader(), Gradients()
    listed = [*ours, first, second] if front == "after" else [first, second, *ours]
    fitted: Any = trainer(
        WINDOW,
        max_epochs=1,
        callbacks=listed,
        enable_checkpointing=issubclass(reader, Checkpoint),
    )
    fitted.fit(module, ragged(RAGGED))
    for each in (first, second):
        assert are_same(each.seen, exact_gradients()[0]) is (front != "plain")
    in_order = [first, second] if reader is Gradients else [second, first]
    assert [c for c in fitted.callbacks if isinstance(c, Gradients)] == in_order
    assert fitted.callbacks[: len(ours)] == ours


@pytest.mark.parametrize("front", ["mixin", "callback", "plain"])
@pytest.mark.parametrize("clip", ["norm", "value"])
def test_gradient_seen_by_module_hooks_equals_big_batch(clip: Clip, front: str) -> None:
    """Clipping comes once, after the division (nano-world-model#22, keras#19990); the
    hook before it sees the exact gradient (transformers#35204)."""
    seen: dict[str, list[Tensor]] = {"before": [], "after": []}

    def on_before_optimizer_step(self: Plain, optimizer: Any) -> None:
        seen["before"].append(gradients(self).clone())

    def configure_gradient_clipping(self: Plain, *args: Any, **how: Any) -> None:
        Plain.configure_gradient_clipping(self, *args, **how)
        seen["after"].append(gradients(self).clone())

    reading = hooked(
        Plain,
        on_before_optimizer_step=on_before_optimizer_step,
        configure_gradient_clipping=configure_gradient_clipping,
    )
    fit(front, reading, max_epochs=1, **clip_options(clip))
    before, after = exact_gradients(clip)
    assert are_same(seen["before"], before) is (front != "plain")
    assert are_same(seen["after"], after) is (front != "plain")
    assert (before[0] - after[0]).norm() > 0.01
