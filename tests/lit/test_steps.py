"""Steps that were really taken, and what Lightning and torch keep to themselves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
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


# ---- each private name that the front relies on --------------------------------------


def test_scaler_of_finds_the_scaler_of_the_precision_plugin() -> None:
    precision = scaled(8.0)
    assert _compat.scaler_of(trainer(plugins=[precision])) is precision.scaler
    assert _compat.scaler_of(trainer()) is None
    off: Any = torch.amp.GradScaler("cpu", enabled=False)
    plugin = MixedPrecision("16-mixed", device="cpu", scaler=off)
    assert _compat.scaler_of(trainer(plugins=[plugin])) is None


@pytest.mark.parametrize("fused", [True, False])
def test_unscales_itself_equals_what_the_scaler_does(fused: bool) -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(weight.sum()).backward()
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(float(weight.grad or 0)))
    scaler.step(optimizer)
    assert _compat.unscales_itself(optimizer) is fused
    assert seen == [4.0 if fused else 1.0]
    assert weight.item() == 0.0


def test_is_scaled_equals_whether_unscale_has_run() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(weight.sum()).backward()
    assert _compat.is_scaled(scaler, optimizer)
    scaler.unscale_(optimizer)
    assert not _compat.is_scaled(scaler, optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert _compat.is_scaled(scaler, optimizer)


def test_unwrapped_finds_the_optimizer_inside_lightnings() -> None:
    found = []

    class Looks(TokenModule):
        def on_train_start(self) -> None:
            found.append((self.optimizers(), self.trainer.optimizers[0]))

    trainer(max_epochs=1).fit(Looks(), loader(DATA, BATCH))
    ((wrapped, plain),) = found
    assert wrapped is not plain
    assert _compat.unwrapped(wrapped) is _compat.unwrapped(plain) is plain


def test_averages_models_finds_the_averaging_period() -> None:
    assert _compat.averages_models(DDPStrategy(model_averaging_period=4))
    assert not _compat.averages_models(DDPStrategy())
    assert not _compat.averages_models(SimpleNamespace())


def test_logged_step_equals_that_of_the_trainer() -> None:
    steps = []

    class Looks(TokenModule):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            steps.append(_compat.logged_step(self.trainer))

    trainer(WINDOW).fit(Looks(), loader(DATA, BATCH))
    assert steps == list(range(6))
