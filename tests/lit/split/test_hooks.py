"""Lightning's loop around a cut batch: its hooks, counts and callbacks as ever."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    WeightAveraging,
)
from lightning.pytorch.tuner.tuning import Tuner

from tests.helpers import deviation, loader, trainer, weights
from tests.lit.fronts import plain_token_loss
from tests.lit.split.common import (
    FIXED,
    SEQUENCES,
    START,
    Split,
    Table,
    fit,
    loader_batches,
    moved,
    pad_and_mask,
)

MANY = (6, 8, 5, 7, 9, 4)
NO_VALIDATION = "ignore:You defined a `validation_step` but"
BY_VALUE = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
PER_MICRO_BATCH = {"on_before_backward", "on_after_backward"}


class Tracing(pl.Callback):
    """Writes down every hook of the training, and at which step it came."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        for name in dir(pl.Callback):
            if name.startswith("on_") and "checkpoint" not in name:
                setattr(self, name, self._noting(name))

    def _noting(self, name: str) -> Any:
        def note(trainer: Any, *args: Any, **kwargs: Any) -> None:
            self.calls.append((name, trainer.global_step))

        return note

    @property
    def of_the_loop(self) -> list[tuple[str, int]]:
        return [call for call in self.calls if call[0] not in PER_MICRO_BATCH]


class Scheduled(Split):
    """Has a scheduler by step, validation, and logs."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", plain_token_loss(self.net, batch))

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
        config = {"scheduler": scheduler, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": config}


def both(
    *, window: int = 1, made: type[Split] = Scheduled, **options: Any
) -> list[tuple[pl.Trainer, Split, Tracing]]:
    """With the cut, and without it."""
    runs = []
    for cut in (FIXED, None):
        module, tracing = made(cut=cut, optimizer="momentum"), Tracing()
        callbacks = [make() for make in options.get("callbacks", [])]
        how = {**options, "callbacks": [tracing, *callbacks]}
        fitted = trainer(window, **how)
        fitted.fit(module, loader_batches(MANY), loader_batches((4, 4)))
        runs.append((fitted, module, tracing))
    return runs


def assert_alike(runs: list[Any]) -> None:
    (ours, mine, our_calls), (theirs, whole, their_calls) = runs
    assert ours.global_step == theirs.global_step
    assert our_calls.of_the_loop == their_calls.of_the_loop
    assert ours.callback_metrics.keys() == theirs.callback_metrics.keys()
    for name, value in theirs.callback_metrics.items():
        torch.testing.assert_close(ours.callback_metrics[name], value)
    assert deviation(mine, whole, START) <= 1e-10
    optimizers = [run[0].optimizers[0].param_groups[0]["lr"] for run in runs]
    assert optimizers[0] == optimizers[1]


@pytest.mark.filterwarnings("ignore:`Trainer.overfit_batches:UserWarning")
@pytest.mark.filterwarnings("ignore:You requested to overfit:UserWarning")
@pytest.mark.filterwarnings("ignore:accumulate_grad_batches=2. the epoch:UserWarning")
@pytest.mark.parametrize(
    "options",
    [
        {"max_steps": 4, "gradient_clip_val": 0.1, "detect_anomaly": True},
        {"max_steps": 8, "val_check_interval": 2, "inference_mode": False},
        {"val_check_interval": 0.5, "profiler": "simple"},
        {"val_check_interval": 4, "check_val_every_n_epoch": None},
        {"check_val_every_n_epoch": 2, "reload_dataloaders_every_n_epochs": 1},
        {"limit_train_batches": 3, "num_sanity_val_steps": 2},
        {"limit_train_batches": 0.5, **BY_VALUE},
        {"fast_dev_run": 3},
        {"overfit_batches": 2},
        {"window": 2, "max_steps": 3},
        {"window": 4, "limit_train_batches": 5},
    ],
    ids=str,
)
def test_loop_runs_as_without_the_cut(options: dict[str, Any]) -> None:
    """Counts, hooks in their order, metrics, learning rates, weights."""
    assert_alike(both(**options))


def test_gradient_hooks_run_for_each_micro_batch() -> None:
    """What the loop's trace leaves out: both run once for each backward pass."""
    (_, _, ours), (_, _, theirs) = both(max_epochs=1)
    mine, whole = (Counter(n for n, _ in t.calls) for t in (ours, theirs))
    for name in PER_MICRO_BATCH:
        assert whole[name] == len(MANY)
        assert mine[name] == sum(-(-size // 4) for size in MANY)


@pytest.mark.filterwarnings("ignore:.*barebones:UserWarning")
def test_barebones_equals_whole_batches() -> None:
    found = []
    for cut in (FIXED, None):
        module = Split(cut=cut)
        fitted = pl.Trainer(accelerator="cpu", barebones=True, max_epochs=2)
        fitted.fit(module, loader_batches())
        found.append((weights(module), fitted.global_step))
    torch.testing.assert_close(found[0], found[1])


# ---- callbacks -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: EarlyStopping("loss_step", patience=1, check_on_train_epoch_end=True),
        lambda: EarlyStopping("val", patience=1, divergence_threshold=0.1),
        lambda: WeightAveraging(),
    ],
    ids=["EarlyStopping train", "EarlyStopping val", "WeightAveraging"],
)
def test_callback_acts_as_without_the_cut(make: Any) -> None:
    assert_alike(both(callbacks=[make], max_epochs=3))


def test_checkpoints_every_n_steps_are_those_of_whole_batches(tmp_path: Path) -> None:
    found = []
    for cut in (FIXED, None):
        folder = tmp_path / str(cut is None)
        saving = ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=-1)
        fit(Split(cut=cut), saving, sizes=MANY, enable_checkpointing=True)
        states = {p.name: torch.load(p, weights_only=True) for p in folder.iterdir()}
        found.append({k: v["state_dict"] for k, v in sorted(states.items())})
    names = {"epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt", "epoch=1-step=12.ckpt"}
    assert found[0].keys() == names
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.filterwarnings(NO_VALIDATION)
def test_learning_rate_monitor_logs_once_a_step() -> None:
    found = []
    for cut in (FIXED, None):
        table = Table()
        monitor = LearningRateMonitor("step")
        options = {"logger": table, "log_every_n_steps": 1, "max_epochs": 1}
        fit(Scheduled(cut=cut), monitor, sizes=MANY, **options)
        found.append([row["lr-SGD"] for row in table.rows if "lr-SGD" in row])
    assert found[0] == found[1]
    assert len(found[0]) == len(MANY)


class Stopping(Scheduled):
    """Ends each epoch before a batch."""

    at = 2

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == self.at else None


def test_epoch_that_ends_early_takes_whole_steps() -> None:
    """`on_train_batch_start` returns -1: nothing is left over for the next epoch."""
    runs = both(made=Stopping)
    assert_alike(runs)
    assert runs[0][0].global_step == 2 * Stopping.at


# ---- optimizers and tuners -----------------------------------------------------------


class Lbfgs(Split):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)


def test_lbfgs_equals_whole_batches() -> None:
    """Its closure runs the whole window again."""
    ours, whole = Lbfgs(), Lbfgs(cut=None)
    fit(ours)
    fit(whole)
    assert deviation(ours, whole, START) <= 1e-9
    assert moved(whole) > 0.1


@pytest.mark.parametrize("kind", ["find", "scale"])
def test_tuners_run_on_whole_batches(kind: str, tmp_path: Path) -> None:
    """Lightning's finders leave callbacks out, and so the cut."""

    class Tuned(Split):
        batch_size = 4
        lr = 0.1

        def train_dataloader(self) -> Any:
            return loader(SEQUENCES, self.batch_size, collate=pad_and_mask)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    module = Tuned()
    fitted = trainer(1, default_root_dir=tmp_path, max_epochs=1)
    tuner = Tuner(fitted)
    tune = {
        "find": lambda: tuner.lr_find(module, num_training=8, update_attr=True),
        "scale": lambda: tuner.scale_batch_size(module, max_trials=2),
    }
    with pytest.warns(UserWarning, match="Finder: Lightning takes all other callbacks"):
        tune[kind]()
    assert moved(module) == 0
    fitted.fit(module)
    assert moved(module) > 0


# ---- after an error ------------------------------------------------------------------


class Failing(Split):
    """Fails in one micro-batch."""

    error: BaseException | None = None
    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        if self.error is not None and self.calls == 6:
            raise self.error
        return super().training_step(batch, batch_idx)


METHODS = {"training_step", "backward", "batch_to_device"}


@pytest.mark.filterwarnings("ignore:accumulation. an open window")
@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=str)
def test_after_an_error_everything_is_as_before(error: BaseException) -> None:
    """The strategy object has its own methods back, and another fit is exact."""
    module = Failing()
    module.error = error
    fitted = trainer(1)
    with pytest.raises(BaseException) as raised:  # noqa: PT011
        fitted.fit(module, loader_batches())
    assert isinstance(raised.value, type(error) | SystemExit)
    assert not METHODS & vars(fitted.strategy).keys()
    assert "log" not in vars(module)
    again, fresh = Failing(), Split()
    for each in (again, fresh):
        trainer(1).fit(each, loader_batches())
    assert deviation(again, fresh, START) == 0
    with torch.no_grad():
        for mine, theirs in zip(module.parameters(), Split().parameters(), strict=True):
            mine.copy_(theirs)
    module.error = None
    trainer(1).fit(module, loader_batches())
    assert deviation(module, fresh, START) == 0


def test_a_second_fit_goes_on() -> None:
    module, fresh = Split(optimizer="momentum"), Split(cut=None, optimizer="momentum")
    for each in (module, fresh):
        fitted = trainer(1)
        fitted.fit(each, loader_batches())
        fitted.fit_loop.max_epochs = 4
        fitted.fit(each, loader_batches())
        assert fitted.global_step == 12
        assert not METHODS & vars(fitted.strategy).keys()
    assert deviation(module, fresh, START) <= 1e-10


@pytest.mark.filterwarnings(NO_VALIDATION)
def test_validate_and_predict_run_whole_batches() -> None:
    class Predicting(Scheduled):
        def predict_step(self, batch: Any, batch_idx: int) -> int:
            return len(batch["ids"])

    module, fitted = Predicting(), trainer(1)
    fitted.fit(module, loader_batches())
    fitted.validate(module, loader_batches(), verbose=False)
    predicted = fitted.predict(module, loader(SEQUENCES, 16))
    assert predicted == [16, 16, 8]
