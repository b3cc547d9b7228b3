"""What trainkit uses of Lightning and torch beyond their documentation still holds."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from tests.helpers import TokenModule, loader, ragged_sequences, trainer
from tests.lit.fronts import Mixed, micro_batches
from trainkit.lit import _compat

DATA = ragged_sequences(38)
BATCH, WINDOW = 4, 4


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


def test_scaler_of_finds_the_scaler_of_the_precision_plugin() -> None:
    scaler: Any = torch.amp.GradScaler("cpu")
    precision = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
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


def test_num_batches_seen_counts_what_the_loader_yields() -> None:
    seen = []

    class Looks(TokenModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(_compat.num_batches_seen(self.trainer) - batch_idx)
            return super().training_step(batch, batch_idx)

    trainer(WINDOW).fit(Looks(), loader(DATA, BATCH))
    assert set(seen) == {1}
