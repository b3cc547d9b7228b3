"""Steps that were really taken, and those that must not be."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from tests.helpers import TokenModule, loader, ragged_sequences, trainer
from trainkit import AccumulationCallback, PerToken
from trainkit.errors import TrainkitError
from trainkit.lit import _compat

DATA = ragged_sequences(38)
BATCH, WINDOW = 4, 4
SCALES = [(2.0**10, 0), (2.0**28, None)]
"""A factor with which no step is lost, and one with which some are."""


class Fused(TokenModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, fused=True)


class CountMoves(pl.Callback):
    """Counts the steps after which the weights are others than before."""

    def __init__(self) -> None:
        self.number = 0

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.before = nn.utils.parameters_to_vector(pl_module.parameters()).clone()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        after = nn.utils.parameters_to_vector(pl_module.parameters())
        self.number += not torch.equal(self.before, after)


def scaled(init_scale: float) -> MixedPrecision:
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=init_scale)
    return MixedPrecision("16-mixed", device="cpu", scaler=scaler)


@pytest.mark.parametrize("kind", [TokenModule, Fused])
@pytest.mark.parametrize(("init_scale", "expected"), SCALES)
@pytest.mark.filterwarnings("ignore:SGD.fused=True. under a gradient scaler")
def test_skipped_steps_equal_those_that_moved_nothing(
    kind: type[TokenModule], init_scale: float, expected: int | None
) -> None:
    """keras#20878: Lightning's own counter goes on; ours tells which were skipped."""
    windows, moves = AccumulationCallback(PerToken()), CountMoves()
    fit = trainer(
        WINDOW, max_epochs=4, plugins=[scaled(init_scale)], callbacks=[windows, moves]
    )
    fit.fit(kind(), loader(DATA, BATCH))
    assert fit.global_step == 12
    assert windows.num_skipped_steps == 12 - moves.number
    assert not windows.skipped_last_step()
    assert expected is None or windows.num_skipped_steps == expected
    assert expected is not None or 0 < windows.num_skipped_steps < 12


def test_step_hooks_are_removed_after_training() -> None:
    windows = AccumulationCallback(PerToken())
    fit = trainer(WINDOW, callbacks=[windows])
    fit.fit(TokenModule(), loader(DATA, BATCH))
    (optimizer,) = fit.optimizers
    torch_optimizer: Any = _compat.unwrapped(optimizer)
    assert not torch_optimizer._optimizer_step_pre_hooks
    assert not torch_optimizer._optimizer_step_post_hooks


class StepsByItself(TokenModule):
    """Runs the closure, and then the torch optimizer behind Lightning's back."""

    def optimizer_step(  # type: ignore[override]
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any
    ) -> None:
        optimizer_closure()
        optimizer.optimizer.step()


@pytest.mark.filterwarnings("ignore:accumulation. an open window")
def test_step_with_undivided_gradients_is_refused() -> None:
    fit = trainer(WINDOW, callbacks=[AccumulationCallback(PerToken())])
    with pytest.raises(TrainkitError, match=r"SGD.step\(\): its window of 4 micro-b"):
        fit.fit(StepsByItself(), loader(DATA, BATCH))
