"""What trainkit uses of Lightning and torch beyond their documentation still holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy

from tests.helpers import ragged_sequences, trainer
from tests.lit.fronts import Mixed, micro_batches
from trainkit.lit import _compat


def test_scaler_of_finds_the_enabled_scaler_only() -> None:
    scaler = torch.amp.GradScaler("cpu")
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    off = MixedPrecision(
        "16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", enabled=False)
    )
    assert _compat.scaler_of(trainer(plugins=plugin)) is scaler
    assert _compat.scaler_of(trainer(plugins=off)) is None
    assert _compat.scaler_of(trainer()) is None
    assert _compat.scaler_of(trainer(precision="bf16-mixed")) is None


@pytest.mark.parametrize("fused", [True, False])
def test_unscales_itself_is_true_of_fused_optimizers(fused: bool) -> None:
    parameters = [torch.nn.Parameter(torch.ones(2))]
    for make in (torch.optim.SGD, torch.optim.AdamW):
        optimizer = make(parameters, lr=0.1, fused=fused)
        assert _compat.unscales_itself(optimizer) is fused


def test_unwrapped_is_the_torch_optimizer() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    assert _compat.unwrapped(LightningOptimizer(optimizer)) is optimizer
    assert _compat.unwrapped(optimizer) is optimizer


def test_averages_models_is_true_of_post_local_sgd_only() -> None:
    assert _compat.averages_models(DDPStrategy(model_averaging_period=4))
    assert not _compat.averages_models(DDPStrategy())
    assert not _compat.averages_models(trainer().strategy)


@pytest.mark.parametrize(("stop", "expected"), [(1, 1), (5, 5), (10, 0)])
def test_batches_into_epoch_counts_those_of_a_checkpoint(
    tmp_path: Path, stop: int, expected: int
) -> None:
    """Saved by a callback in `on_train_batch_end`, and once at the end of the epoch."""
    path = tmp_path / "one.ckpt"

    class Saving(Mixed):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx + 1 == stop:
                self.trainer.save_checkpoint(path)

    trainer(1, max_epochs=1).fit(Saving(), micro_batches(ragged_sequences(38)))
    checkpoint = torch.load(path, weights_only=True)
    assert _compat.batches_into_epoch(checkpoint) == expected
    assert _compat.batches_into_epoch({"state_dict": {}}) == 0


def test_is_scaled_until_the_scaler_has_unscaled() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer: Any = torch.optim.SGD([parameter], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(parameter.sum()).backward()
    assert _compat.is_scaled(scaler, LightningOptimizer(optimizer))
    scaler.unscale_(optimizer)
    assert not _compat.is_scaled(scaler, LightningOptimizer(optimizer))
    scaler.step(optimizer)
    scaler.update()
    assert _compat.is_scaled(scaler, optimizer)


def test_logged_step_is_that_of_lightnings_own_logs() -> None:
    """In automatic optimization, the number of steps that were taken before."""
    seen = []

    class Looking(Mixed):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append((_compat.logged_step(self.trainer), self.global_step))
            return super().training_step(batch, batch_idx)

    trainer(4, max_epochs=1).fit(Looking(), micro_batches(ragged_sequences(38)))
    assert seen == [(i // 4, i // 4) for i in range(10)]
