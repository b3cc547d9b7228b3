"""Lightning's loop around a cut batch: its hooks, counts and callbacks as ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    WeightAveraging,
)

from tests.helpers import NAIVE, deviation, loader, trainer, weights
from tests.lit.split.common import (
    FIXED,
    SEQUENCES,
    START,
    Seen,
    Split,
    assert_as_whole,
    fit,
    loader_batches,
)
from tests.zoo.callbacks import told
from tests.zoo.modules import Plain, hooked, on_front

MANY = (6, 8, 5, 7, 9, 4)
SAVES = {"enable_checkpointing": True}
NO_VALIDATION = "ignore:You defined a `validation_step` but"
BY_VALUE = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}


class Scheduled(Split):
    """Has a scheduler by step, validation, and logs."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**{"optimizer": "momentum", **how})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss_of(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> int:
        return len(batch["ids"])

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
        config = {"scheduler": scheduler, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": config}


def ending_early(self: Any, batch: Any, batch_idx: int) -> Any:
    return -1 if batch_idx == 2 else None


@pytest.mark.filterwarnings("ignore:`Trainer.overfit_batches:UserWarning")
@pytest.mark.filterwarnings("ignore:You requested to overfit:UserWarning")
@pytest.mark.filterwarnings("ignore:accumulate_grad_batches=2. the epoch:UserWarning")
@pytest.mark.filterwarnings("ignore:Checkpoint directory")
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
        {"fast_dev_run": 3, "naive": 0},
        {"overfit_batches": 2},
        {"window": 2, "max_steps": 3},
        {"window": 4, "limit_train_batches": 5},
        {"kind": hooked(Scheduled, on_train_batch_start=ending_early)},
        *[
            {"callbacks": lambda make=make: [make()], "max_epochs": 3, **SAVES}
            for make in (
                lambda: EarlyStopping("loss_step", patience=1),
                lambda: EarlyStopping("val", patience=1),
                lambda: LearningRateMonitor("step"),
                lambda: ModelCheckpoint(every_n_train_steps=4, save_top_k=-1),
                WeightAveraging,
            )
        ],
    ],
    ids=lambda options: "-".join(options),
)
def test_loop_runs_as_without_the_cut(options: dict[str, Any], tmp_path: Path) -> None:
    """Whatever the Trainer's options and callbacks are."""
    how: Any = {"kind": Scheduled, "sizes": MANY, **options}
    how |= {"default_root_dir": tmp_path}
    ours = assert_as_whole(validation=loader_batches((4, 4)), **how)
    assert "kind" not in options or ours.global_step == 4  # two in an epoch


def test_gradient_hooks_run_for_each_micro_batch() -> None:
    """Both run once for each backward pass."""
    calls: list[str] = []
    keep: Any = {
        name: lambda *args, name=name: calls.append(name)
        for name in Seen.per_micro_batch
    }
    fit(Split(), LambdaCallback(**keep), sizes=MANY, max_epochs=1)
    for name in Seen.per_micro_batch:
        assert calls.count(name) == sum(-(-size // 4) for size in MANY)


@pytest.mark.filterwarnings(NO_VALIDATION)
def test_validate_and_predict_run_whole_batches() -> None:
    fitted = fit(module := Scheduled())
    fitted.validate(module, loader_batches(), verbose=False)
    assert fitted.predict(module, loader(SEQUENCES, 16)) == [16, 16, 8]


def test_a_second_fit_goes_on() -> None:
    ends = []
    for cut in (FIXED, None):
        module, fitted = Split(cut=cut, optimizer="momentum"), trainer(1)
        fitted.fit(module, loader_batches())
        fitted.fit_loop.max_epochs = 4
        fitted.fit(module, loader_batches())
        assert fitted.global_step == 12
        ends.append(weights(module))
    assert deviation(ends[0], ends[1], START) <= 1e-10


# ---- what is returned beside the loss ------------------------------------------------


def with_extras(self: Any, batch: Any, batch_idx: int) -> Any:
    loss = self.loss_of(batch)
    same = {"text": "a", "flag": True, "nothing": None, "epoch": 3}
    by_rows = {"mean": loss.item(), "name": str(len(batch["ids"])), "rows": 4}
    return {"loss": loss, **same, **by_rows}


def test_plain_values_beside_the_loss_are_as_of_the_whole_batch_or_a_list() -> None:
    """A float is the mean, an equal text one text; an int may be a count of rows."""
    seen: list[Any] = []
    keep = LambdaCallback(
        on_train_batch_end=lambda t, m, outputs, *rest: seen.append(outputs)
    )
    for cut in (None, FIXED):
        module = hooked(Split, training_step=with_extras)(cut=cut)
        fit(module, keep, max_epochs=1, limit_train_batches=1)
    whole, found = seen
    for name in ("text", "flag", "nothing"):
        assert found[name] is whole[name]
    assert isinstance(found["mean"], float)
    assert found["mean"] == pytest.approx(whole["mean"], rel=1e-12)
    assert found["epoch"] == [3] * 4
    assert found["rows"] == [4] * 4
    assert sorted(found["name"]) == ["3", "3", "4", "4"]  # of 14 rows


# ---- steps that are left out ---------------------------------------------------------


def every_second(
    self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
) -> None:
    """Runs the closure, as Lightning asks, and steps every second time."""
    self.num_calls += 1
    if self.num_calls % 2:
        optimizer_closure()
    else:
        pl.LightningModule.optimizer_step(
            self, epoch, batch_idx, optimizer, optimizer_closure
        )


HALF = hooked(Plain, optimizer_step=every_second, num_calls=0)
DROPPED = "accumulation: an open window of"


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("front", ["mixin", "callback"])
def test_the_window_of_a_step_left_out_is_dropped_and_said(
    front: str, window: int
) -> None:
    """As often as in streamed windows; the last of an epoch when it ends. Plain batches
    whose steps are all taken are the control."""
    ends, said = [], []
    for cut in (FIXED, None):
        module, ours = on_front(front, HALF, cut=cut)
        with told(DROPPED) as texts:
            fit(module, *ours, window=window)
        said.append([text.partition("since ")[2] for text in texts])
        ends.append(module)
    fit(taken := Plain(), window=window)
    assert said[0] == said[1]
    assert len(said[0]) == {1: 3, 2: 2}[window]
    assert {text.split(" its ")[0] for text in said[0]}
    assert any("optimizer_step left its step out" in text for text in said[0])
    assert any("epoch ended inside it" in text for text in said[0]) == (window == 1)
    assert deviation(ends[0], ends[1], START) <= 1e-10
    assert deviation(taken, ends[1], START) > NAIVE
