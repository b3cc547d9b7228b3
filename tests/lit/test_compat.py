"""What trainkit uses of Lightning and torch beyond their documentation still holds."""

from __future__ import annotations

import copy
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from tests.helpers import TokenModule, loader, pad, ragged_sequences, trainer
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


@pytest.mark.parametrize("owner", ["module", "data module"])
@pytest.mark.filterwarnings("ignore:You have overridden `on_before_batch_transfer`")
def test_before_batch_transfer_equals_the_hook_of_its_owner(owner: str) -> None:
    """The data module's comes first, where there is one that has it."""
    seen: list[tuple[Any, Any]] = []

    class Doubles(TokenModule):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return {**batch, "by": "module"} if owner == "module" else batch

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            again = {name: batch[name] for name in ("ids", "labels")}
            found = _compat.before_batch_transfer(self, again)
            seen.append((batch.get("by"), found.get("by")))
            return super().training_step(batch, batch_idx)

    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader(DATA, BATCH)

        if owner == "data module":

            def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
                return {**batch, "by": "data module"}

    trainer(max_epochs=1).fit(Doubles(), Data())
    assert set(seen) == {(owner, owner)}


def test_forget_iterator_leaves_persistent_workers_to_the_original() -> None:
    original = DataLoader(
        DATA,  # type: ignore[arg-type]
        batch_size=BATCH,
        collate_fn=pad,
        num_workers=1,
        persistent_workers=True,
    )
    iterator = iter(original)
    next(iterator)
    shared = copy.copy(original)
    assert iter(shared) is iterator  # the negative control: the pass starts anew
    next(iterator)
    mine = iter(_compat.forget_iterator(copy.copy(original)))
    assert mine is not iterator
    assert len(list(mine)) == 10
    assert len(list(iterator)) == 9


@pytest.mark.parametrize("mode", ["min_size", "max_size"])
def test_combined_loader_holds_all_loaders_and_how_they_are_combined(
    mode: Any,
) -> None:
    found = []

    class Looks(TokenModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch["a"], batch_idx)

        def on_train_start(self) -> None:
            combined = _compat.combined_loader(self.trainer)
            found.extend([combined.flattened, copy.copy(combined)])

    pair = {"a": loader(DATA, BATCH), "b": loader(DATA[:8], BATCH)}
    fit = trainer(max_epochs=1, limit_train_batches=2)
    fit.fit(Looks(), CombinedLoader(pair, mode))
    assert found[0] == list(pair.values())
    length = {"min_size": 2, "max_size": 10}[mode]
    found[1].limits = None
    assert len(list(found[1])) == length


@pytest.mark.parametrize("only", [True, False])
@pytest.mark.parametrize("every", [1, 2, 5])
def test_saves_weights_now_equals_when_model_checkpoint_saves(
    tmp_path: Path, every: int, only: bool
) -> None:
    saving = ModelCheckpoint(
        tmp_path,
        every_n_train_steps=every,
        save_weights_only=only,
        save_top_k=-1,
        filename="{step}",
    )
    trainer(WINDOW, callbacks=[saving], enable_checkpointing=True).fit(
        TokenModule(), loader(DATA, BATCH)
    )
    saved = {int(p.stem.removeprefix("step=")) for p in tmp_path.glob("*.ckpt")}
    due = {s for s in range(1, 7) if _compat.saves_weights_now(saving, s)}
    assert due == (saved if only else set())
    assert saved == {s for s in range(1, 7) if s % every == 0}
    assert not _compat.saves_weights_now(pl.Callback(), 1)


@pytest.mark.parametrize("only", [True, False])
@pytest.mark.parametrize("by_time", [True, False])
def test_saves_weights_by_time_equals_what_model_checkpoint_was_asked_for(
    tmp_path: Path, by_time: bool, only: bool
) -> None:
    due = {"train_time_interval": timedelta(0)} if by_time else {"every_n_epochs": 9}
    saving = ModelCheckpoint(tmp_path, save_weights_only=only, **due)  # type: ignore[arg-type]
    assert _compat.saves_weights_by_time(saving) is (only and by_time)
    trainer(callbacks=[saving], enable_checkpointing=True, max_epochs=1).fit(
        TokenModule(), loader(DATA, BATCH)
    )
    assert any(tmp_path.iterdir()) is by_time
    assert not _compat.saves_weights_by_time(pl.Callback())


def test_average_of_finds_the_model_that_lightning_averages() -> None:
    callback, found = EMAWeightAveraging(decay=0.5), []

    class Looks(TokenModule):
        def on_train_end(self) -> None:
            found.append(_compat.average_of(callback))

    assert _compat.average_of(callback) is None
    trainer(max_epochs=1, callbacks=[callback]).fit(Looks(), loader(DATA, BATCH))
    assert isinstance(found[0], AveragedModel)
    assert isinstance(found[0].module, Looks)
    assert _compat.average_of(Callback()) is None


def test_shown_now_holds_what_the_batch_or_the_validation_has_logged() -> None:
    """Lightning's own `progress_bar_metrics` also keeps all earlier values."""
    seen: list[tuple[dict[str, float], dict[str, Any]]] = []

    class Logging(Mixed):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("train/n", float(batch_idx), prog_bar=True)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/n", 7.0, prog_bar=True)

    class Reading(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
            metrics = dict(trainer.progress_bar_metrics)
            seen.append((_compat.shown_now(trainer), metrics))

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            self.on_train_batch_end(trainer)

    data = micro_batches(ragged_sequences(8), [4, 4])
    trainer(
        1, callbacks=[Reading()], max_epochs=1, val_check_interval=1,
        num_sanity_val_steps=0,
    ).fit(Logging(), data, data)  # fmt: skip
    assert [now for now, _ in seen] == [
        {"train/n": 0.0}, {"val/n": 7.0}, {"train/n": 1.0}, {"val/n": 7.0}
    ]  # fmt: skip
    assert seen[2][1] == {"train/n": 1.0, "val/n": 7.0}
