"""A schedule beside Lightning's callbacks that set the Trainer's numbers themselves."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.tuner.tuning import Tuner
from torch import nn

from tests.helpers import trainer
from tests.lit.fronts import Mixed
from tests.lit.schedule.scheduling import (
    SEQUENCES,
    Watch,
    batches,
    fitted,
    token_counts,
    windows_of_plan,
)
from trainkit import AccumulationSchedule

PLAN = {0: 4, 3: 3, 5: 1}


def plan() -> AccumulationSchedule:
    return AccumulationSchedule(PLAN, unit="step")


class Found(Mixed):
    """What the finders look for."""

    batch_size = 2
    lr = 0.1

    def train_dataloader(self) -> Any:
        return batches(self.batch_size)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def check_fit(fit: pl.Trainer, module: Found, size: int, watch: Watch) -> None:
    """The loader's new size, whole epochs, and the plan from its start."""
    number = -(-len(SEQUENCES) // size)
    counts = [1] * number
    windows = windows_of_plan(PLAN, "step", counts, epochs=2)
    assert fit.global_step == sum(map(len, windows))
    ends = [number * e + w.stop - 1 for e, ws in enumerate(windows) for w in ws]
    assert watch.stepped == ends
    assert fit.accumulate_grad_batches == 1


def step_text(size: int) -> str:
    return f"per-device batch {size} x accumulation 4 x ranks 1 = {4 * size} samples"


@pytest.mark.filterwarnings("ignore:BatchSizeFinder. Lightning takes all other")
@pytest.mark.parametrize("as_callback", [True, False])
def test_fit_after_the_batch_size_finder_follows_the_plan(
    as_callback: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """pytorch-lightning#18394, #13851: the new size counts, nothing stays truncated."""
    module, watch = Found(), Watch()
    how: dict[str, Any] = {"max_trials": 2, "steps_per_trial": 3}
    callbacks = [BatchSizeFinder(**how)] if as_callback else []
    fit = trainer(callbacks=[plan(), *callbacks, watch])
    if not as_callback:
        Tuner(fit).scale_batch_size(module, **how)
        watch.stepped.clear()
        watch.batch = -1
    fit.fit(module)
    assert module.batch_size > 2
    check_fit(fit, module, module.batch_size, watch)
    assert step_text(module.batch_size) in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:LearningRateFinder. Lightning takes all other")
@pytest.mark.parametrize("as_callback", [True, False])
def test_fit_after_the_rate_finder_follows_the_plan(as_callback: bool) -> None:
    """pytorch-lightning#1726; frgfm/holocron#504: a partial window was left over."""
    module, watch = Found(), Watch()
    callbacks = [LearningRateFinder(num_training_steps=9)] if as_callback else []
    fit = trainer(callbacks=[plan(), *callbacks, watch])
    if not as_callback:
        Tuner(fit).lr_find(module, num_training=9)
        watch.stepped.clear()
        watch.batch = -1
    fit.fit(module)
    check_fit(fit, module, 2, watch)


@pytest.mark.parametrize("batch_norm", [True, False])
def test_schedule_with_weight_averaging_keeps_its_windows(batch_norm: bool) -> None:
    """Its last epoch, for BatchNorm's statistics, sets the number itself."""
    module, watch = Mixed(), Watch()
    if batch_norm:
        module.norm = nn.BatchNorm1d(3)
    averaging = StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1)
    _, fit = fitted("mixin", plan(), averaging, watch, module=module)
    windows = windows_of_plan(PLAN, "step", token_counts())
    ends = [10 * e + w.stop - 1 for e, ws in enumerate(windows) for w in ws]
    assert watch.stepped[: len(ends)] == ends
    assert fit.accumulate_grad_batches == 1
