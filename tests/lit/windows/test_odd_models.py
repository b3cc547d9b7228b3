"""Unusual parameters and modules train exactly, and so do their copies."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.helpers import deviation, ragged_sequences, trainer, weights
from tests.lit.fronts import (
    RAGGED,
    WINDOW,
    Mixed,
    Plain,
    merged,
    micro_batches,
)
from trainkit import AccumulationCallback, PerToken

SEQUENCES = ragged_sequences(38)
START = weights(Plain())


def fit_both(make: Callable[[], Plain], **options: Any) -> tuple[Plain, Plain]:
    """The module in micro-batches with the callback, and in big batches without."""
    exact, reference = make(), make()
    callbacks = [AccumulationCallback(PerToken())]
    trainer(WINDOW, callbacks=callbacks, **options).fit(exact, micro_batches(SEQUENCES))
    trainer(**options).fit(reference, micro_batches(SEQUENCES, merged(RAGGED)))
    return exact, reference


def assert_exact(make: Callable[[], Plain], **options: Any) -> Plain:
    """It equals itself trained with big batches, and without trainkit it does not."""
    start = weights(make())
    exact, reference = fit_both(make, **options)
    naive = make()
    trainer(WINDOW, **options).fit(naive, micro_batches(SEQUENCES))
    assert deviation(exact, reference, start) <= 1e-10
    assert deviation(naive, reference, start) > 1e-2
    return exact


# ---- parameters ----------------------------------------------------------------------


class Sparse(Plain):
    """Embedding gradients with rows for used words only."""

    def __init__(self, *, kind: str = "SGD") -> None:
        super().__init__()
        self.kind = kind
        vectors = self.net.embed.weight.detach().clone()
        self.net.embed = nn.Embedding.from_pretrained(
            vectors, freeze=False, sparse=True
        )
        if kind == "SparseAdam":
            self.net.head.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        if self.kind == "SGD":
            return torch.optim.SGD(self.parameters(), lr=0.5)
        return torch.optim.SparseAdam([self.net.embed.weight], lr=0.05)


@pytest.mark.parametrize("kind", ["SGD", "SparseAdam"])
def test_sparse_gradients_equal_big_batch(kind: str) -> None:
    assert_exact(lambda: Sparse(kind=kind))


class Partial(Plain):
    """One layer is frozen, one unused, one left out of the optimizer."""

    def __init__(self) -> None:
        super().__init__(optimizer="adamw")
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.unused = nn.Linear(2, 2, dtype=torch.float64)
            self.left_out = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.net.embed.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * self.left_out

    def configure_optimizers(self) -> Any:
        trained = [*self.net.parameters(), *self.unused.parameters()]
        return torch.optim.AdamW(trained, lr=0.01)


def test_frozen_and_unused_parameters_do_not_move() -> None:
    """Without a gradient there is no step: also no weight decay."""
    before = Partial()
    module = assert_exact(Partial)
    assert isinstance(module, Partial)
    for name in ("unused.weight", "net.embed.weight", "left_out"):
        assert torch.equal(module.get_parameter(name), before.get_parameter(name))


class Unfreezing(Plain):
    """Thaws its embedding for the second epoch and tells the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.net.embed.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.head.parameters(), lr=0.5)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net.embed.requires_grad_(True)
            optimizer: Any = self.optimizers()
            optimizer.add_param_group({"params": [self.net.embed.weight]})


def test_parameters_thawed_between_epochs_equal_big_batch() -> None:
    assert_exact(Unfreezing)


class Checkpointed(Plain):
    """Runs its forward pass again in the backward pass."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        def run(ids: Tensor) -> Tensor:
            return self.net(ids)

        def net(ids: Tensor) -> Any:
            return checkpoint(run, ids, use_reentrant=False)

        return self.loss(net, batch)


def test_gradient_checkpointing_equals_big_batch() -> None:
    assert_exact(Checkpointed)


@pytest.mark.slow
def test_compiled_module_equals_big_batch() -> None:
    callbacks = [AccumulationCallback(PerToken())]
    exact, reference = Plain(), Plain()
    compiled: Any = torch.compile(exact, backend="aot_eager", dynamic=True)
    trainer(WINDOW, callbacks=callbacks).fit(compiled, micro_batches(SEQUENCES))
    trainer().fit(reference, micro_batches(SEQUENCES, merged(RAGGED)))
    assert deviation(exact, reference, START) <= 1e-10


# ---- copies --------------------------------------------------------------------------


class Copying(pl.Callback):
    """Copies the module inside a window, as averaging and search tools do."""

    def __init__(self, how: Callable[[Any], Any]) -> None:
        self.how = how
        self.copied: Any = None

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 5:
            self.copied = self.how(pl_module)


def through_pickle(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module))


@pytest.mark.parametrize("how", [copy.deepcopy, through_pickle])
def test_module_copied_inside_a_window_trains_exactly(
    how: Callable[[Any], Any],
) -> None:
    """The original is not disturbed, and the copy starts a window of its own."""
    copying = Copying(how)
    original = Mixed()
    trainer(WINDOW, callbacks=[copying], max_epochs=1).fit(
        original, micro_batches(SEQUENCES)
    )
    reference = Plain()
    trainer(max_epochs=1).fit(reference, micro_batches(SEQUENCES, merged(RAGGED)))
    assert deviation(original, reference, START) <= 1e-10
    copied, plain = copying.copied, Plain()
    plain.load_state_dict(copied.state_dict())
    before = weights(copied)
    trainer(WINDOW, max_epochs=1).fit(copied, micro_batches(SEQUENCES))
    trainer(max_epochs=1).fit(plain, micro_batches(SEQUENCES, merged(RAGGED)))
    assert deviation(copied, plain, before) <= 1e-10
