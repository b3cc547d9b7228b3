"""Everybody sees the exact gradient: other callbacks, the module's hooks, clipping."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning as old_pl
import torch
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor

from tests.helpers import (
    OPTIMIZERS,
    TokenNet,
    deviation,
    gradients,
    ragged_sequences,
    trainer,
    weights,
)
from tests.lit.fronts import (
    RAGGED,
    WINDOW,
    Clip,
    Mixed,
    Plain,
    batches_of,
    big_batch,
    clip_,
    clip_options,
    merged,
    micro_batches,
    plain_token_loss,
)
from trainkit import AccumulationCallback, AccumulationMixin, PerToken

SEQUENCES = ragged_sequences(38)


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


class Reader(pl.Callback):
    """A user's callback that reads gradients where it is documented to."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_before_optimizer_step(
        self, trainer: Any, pl_module: Any, optimizer: Any
    ) -> None:
        self.seen.append(gradients(pl_module).clone())


class CheckpointReader(Reader, Checkpoint):
    """One that Lightning sorts behind all others."""


def allowing(reader: type[Reader]) -> dict[str, Any]:
    """Lightning wants to be told that there is a `Checkpoint` in the list."""
    return {"enable_checkpointing": issubclass(reader, Checkpoint)}


class ReadingHooks(Mixed):
    """A module that reads in its own hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.before: list[Tensor] = []
        self.clipped: list[Tensor] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.before.append(gradients(self).clone())

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: Any = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        super().configure_gradient_clipping(
            optimizer, gradient_clip_val, gradient_clip_algorithm
        )
        self.clipped.append(gradients(self).clone())


def assert_same(seen: list[Tensor], expected: list[Tensor]) -> None:
    assert len(seen) == len(expected)
    for mine, theirs in zip(seen, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("reader", [Reader, CheckpointReader])
@pytest.mark.parametrize("front", ["mixin", "before", "after"])
def test_gradient_seen_by_any_callback_equals_big_batch(
    front: str, reader: type[Reader]
) -> None:
    """Wherever it stands in the list (keras#20241's smaller last batch included)."""
    other, ours = reader(), AccumulationCallback(PerToken())
    listed = {"mixin": [other], "before": [other, ours], "after": [ours, other]}
    module = Mixed() if front == "mixin" else Plain()
    fitted = trainer(WINDOW, max_epochs=1, callbacks=listed[front], **allowing(reader))
    fitted.fit(module, micro_batches(SEQUENCES))
    assert_same(other.seen, exact_gradients()[0])


def test_gradient_seen_without_trainkit_differs() -> None:
    """Negative control."""
    other = Reader()
    trainer(WINDOW, max_epochs=1, callbacks=[other]).fit(
        Plain(), micro_batches(SEQUENCES)
    )
    exact = exact_gradients()[0][0]
    assert (other.seen[0] - exact).norm() / exact.norm() > 0.1


@pytest.mark.parametrize("clip", ["norm", "value"])
def test_gradient_seen_by_module_hooks_equals_big_batch(clip: Clip) -> None:
    """Clipping comes once, after the division (nano-world-model#22, keras#19990); the
    hook before it sees the exact gradient (transformers#35204)."""
    module = ReadingHooks()
    trainer(WINDOW, max_epochs=1, **clip_options(clip)).fit(
        module, micro_batches(SEQUENCES)
    )
    before, after = exact_gradients(clip)
    assert_same(module.before, before)
    assert_same(module.clipped, after)
    assert (before[0] - after[0]).norm() > 0.01


def test_ours_stands_first_and_others_keep_their_order() -> None:
    """Lightning runs callbacks in the order of the list."""
    first, second = Reader(), CheckpointReader()
    ours = AccumulationCallback(PerToken())
    fitted = trainer(
        2, max_epochs=1, callbacks=[second, first, ours], **allowing(CheckpointReader)
    )
    fitted.fit(Plain(), micro_batches(SEQUENCES))
    listed: list[Any] = vars(fitted)["callbacks"]
    assert listed[0] is ours
    assert [c for c in listed if isinstance(c, Reader)] == [first, second]


# ---- both namespaces -----------------------------------------------------------------


class OldPlain(old_pl.LightningModule):
    """The same module, of the package named `pytorch_lightning`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = TokenNet(dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return plain_token_loss(self.net, batch)

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS["momentum"](self.parameters())


# Made by hand: pyright takes the two packages' LightningModules for rivals.
OldMixed: Any = type(
    "OldMixed", (AccumulationMixin, OldPlain), {"accumulation": PerToken()}
)


QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "max_epochs": 2,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@pytest.mark.parametrize("front", ["mixin", "callback"])
@pytest.mark.parametrize("namespace", ["lightning.pytorch", "pytorch_lightning"])
def test_both_namespaces_equal_big_batch(namespace: str, front: str) -> None:
    is_old = namespace == "pytorch_lightning"
    make = old_pl.Trainer if is_old else pl.Trainer
    plain = OldPlain() if is_old else Plain(optimizer="momentum")
    mixed = OldMixed() if is_old else Mixed(optimizer="momentum")
    module: Any = mixed if front == "mixin" else plain
    callbacks: Any = [] if front == "mixin" else [AccumulationCallback(PerToken())]
    start = weights(module)
    fitted = make(
        accumulate_grad_batches=WINDOW, gradient_clip_val=0.1, callbacks=callbacks,
        **QUIET,
    )  # fmt: skip
    fitted.fit(module, micro_batches(SEQUENCES))
    expected = big_batch(SEQUENCES, optimizer="momentum", clip="norm")
    assert deviation(module, expected.end, start) <= 1e-10
