"""What changes while it trains: the loader, the optimizer's groups, the scheduler."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging
from torch import Tensor, nn

from tests.core.plan.schedulers import deviation
from tests.helpers import trainer
from tests.lit.rates.scaled import (
    BATCHES,
    EXACT,
    REFERENCE,
    STEPS,
    Saves,
    Scheduled,
    adamw,
    data,
    fit,
    linear,
    plain,
    times,
)
from trainkit import AccumulationCallback, AccumulationSchedule, Uniform
from trainkit.lit.rates.lr_scaling import LRScaling

# ---- another loader ------------------------------------------------------------------

SIZES = [3, 6, 1, 2]


class Reloads(Scheduled):
    """Its loader has another batch size in each epoch."""

    def train_dataloader(self) -> Any:
        return data(SIZES[self.trainer.current_epoch])


@pytest.mark.parametrize(
    ("name", "with_windows"),
    [(None, True), ("CosineAnnealingLR", False), ("OneCycleLR-cos", True)],
)
def test_curve_over_loaders_of_other_sizes_equals_each_factor(
    name: str | None, with_windows: bool
) -> None:
    module, scaling = Reloads(name), linear()
    callbacks = [AccumulationCallback(Uniform())] * with_windows
    how: dict[str, Any] = {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 4}
    made = _fit_by_its_own(module, scaling, *callbacks, **how)
    factors = [2 * size / REFERENCE for size in SIZES for _ in range(STEPS)]
    assert deviation(module.curve, times(plain(name, 20), factors)) <= EXACT
    assert scaling.k == 2 * SIZES[-1] / REFERENCE
    assert made.num_training_batches == BATCHES


def _fit_by_its_own(module: Any, *callbacks: Any, **how: Any) -> Any:
    made = trainer(2, callbacks=list(callbacks), **how)
    made.fit(module)
    return made


# ---- StochasticWeightAveraging -------------------------------------------------------


class Averaged(Scheduled):
    """With a BatchNorm, for whose statistics an extra epoch is run."""

    def __init__(self, optimizer: Any = torch.optim.SGD) -> None:
        super().__init__(None, (0.1, 0.1), optimizer=optimizer)
        self.norm = nn.BatchNorm1d(1, dtype=torch.float64)
        self.seen: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        self.seen.append(optimizer.param_groups[0]["lr"])
        return super().training_step(self.norm(batch), batch_idx)

    def on_train_end(self) -> None:
        optimizer: Any = self.optimizers()
        self.end = optimizer.param_groups[0]


def averaged(*callbacks: Any, window: int = 2, **how: Any) -> Any:
    swa = StochasticWeightAveraging(
        swa_lrs=[0.03, 0.05], swa_epoch_start=2, annealing_epochs=2
    )
    ours = [AccumulationCallback(Uniform()), *callbacks, swa]
    return fit(Averaged(**how), *ours, window=window, max_epochs=6)


@cache
def unscaled_average() -> Any:
    return averaged()


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0)])
def test_averaging_phase_equals_factor_times_the_plain_one(
    rule: Any, factor: float
) -> None:
    """It anneals from the rates it finds to rates of its own."""
    scaled = averaged(LRScaling(rule, reference_batch=REFERENCE))
    unscaled = unscaled_average()
    assert len(scaled.curve) == len(unscaled.curve) == 6 * STEPS + 1
    expected = times(unscaled.curve, [factor] * len(unscaled.curve))
    assert deviation(scaled.curve, expected) <= EXACT
    assert unscaled.curve[-1][:2] == pytest.approx([0.03, 0.05])


def test_averaging_phase_over_a_schedule_equals_each_factor() -> None:
    """The window changes before the phase, within it, and after its annealing."""

    def schedule() -> AccumulationSchedule:
        return AccumulationSchedule({0: 1, 1: 5, 3: 2, 5: 10})

    scaled = averaged(schedule(), linear(), window=1)
    unscaled = averaged(schedule(), window=1)
    sizes = [1] * 10 + [5] * 4 + [2] * 10 + [10] * 2
    factors = [2.0 * size for size in sizes]
    assert deviation(scaled.curve, times(unscaled.curve, factors)) <= EXACT


def small_beta(parameters: Any, **how: Any) -> Any:
    return adamw(parameters, **how, betas=(0.9, 0.999))


@pytest.mark.parametrize("rule", ["linear", "adam-sde"])
def test_statistics_epoch_of_averaging_changes_nothing(rule: Any) -> None:
    """Its window is the entire epoch: k would be 20, and 20 x 0.1 out of reach."""
    scaling = LRScaling(rule, reference_batch=REFERENCE)
    module = averaged(scaling, optimizer=small_beta)
    assert len(module.seen) == 7 * BATCHES  # an epoch more than were asked for
    assert len(module.curve) == 6 * STEPS + 1  # a step without gradients
    assert set(module.seen[-BATCHES - 1 :]) == {module.curve[-1][0]}
    assert scaling.k == 4.0
    for key in ("lr", "betas", "eps"):
        assert module.end[key] == module.groups[-1][key]


# ---- groups that come later ----------------------------------------------------------


class Adds(BaseFinetuning):
    """Adds a group in the second epoch."""

    def __init__(self, lr: float | None) -> None:
        super().__init__()
        self.lr = lr

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            how = {"lr": self.lr, "initial_denom_lr": 1.0}
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, **how)


class Finetuned(Scheduled):
    def __init__(self) -> None:
        super().__init__(None, (0.1,), optimizer=adamw)
        self.backbone = nn.Linear(1, 1, dtype=torch.float64)
        self.all_groups: list[list[dict[str, Any]]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch + self.backbone(batch), batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        self.all_groups.append([dict(group) for group in optimizer.param_groups])


def finetuned(*callbacks: Any, lr: float | None = 0.01, **how: Any) -> Any:
    ours = [AccumulationCallback(Uniform()), *callbacks, Adds(lr)]
    return fit(Finetuned(), *ours, window=1, max_epochs=3, **how)


ADDED = "AdamW: 1 group.s. of parameters were added during training.*multiply it by 2"


@pytest.mark.parametrize("rule", ["adam-sde", "sqrt"])
def test_group_added_in_mid_training_is_scaled_but_for_its_rate(rule: Any) -> None:
    """And a later change of the window applies to all of them alike."""
    schedule = AccumulationSchedule({0: 2, 2: 8})
    scaling = LRScaling(rule, reference_batch=REFERENCE, weight_decay="sqrt")
    with pytest.warns(UserWarning, match=ADDED) as said:
        module = finetuned(schedule, scaling)
    assert sum("group(s)" in str(w.message) for w in said) == 1
    assert_alike(module)
    rates = [[group["lr"] for group in groups] for groups in module.all_groups]
    assert rates[5:10] == [pytest.approx([0.2, 0.01])] * 5
    assert rates[10:] == [pytest.approx([0.4, 0.02])] * 2
    decays = [groups[0]["weight_decay"] for groups in module.all_groups]
    assert decays == pytest.approx([0.02] * 10 + [0.04] * 2)


def test_group_added_under_a_rule_that_leaves_rates_is_not_spoken_of() -> None:
    """Filters turn any warning into an error."""
    scaling = LRScaling("half-life", reference_batch=REFERENCE, weight_decay="linear")
    module = finetuned(AccumulationSchedule({0: 2, 2: 8}), scaling)
    assert_alike(module)
    assert [group["lr"] for group in module.all_groups[-1]] == [0.1, 0.01]


def assert_alike(module: Any) -> None:
    """From its first step on, the new group has the moments of the other."""
    assert [len(groups) for groups in module.all_groups] == [1] * 5 + [2] * 7
    for groups in module.all_groups:
        for group in groups[1:]:
            for key in ("betas", "eps", "weight_decay"):
                assert group[key] == pytest.approx(groups[0][key], rel=1e-12)


def test_group_added_with_the_rate_in_force_is_left_there() -> None:
    """Lightning takes the first group's rate, which is scaled already."""
    scaling = LRScaling("sqrt", reference_batch=REFERENCE)
    with pytest.warns(UserWarning, match=ADDED):
        module = finetuned(AccumulationSchedule({0: 2}), scaling, lr=None)
    assert [group["lr"] for group in module.all_groups[-1]] == [0.2, 0.2]


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended")
def test_run_resumed_after_a_group_was_added_equals_the_uninterrupted_one(
    tmp_path: Path,
) -> None:
    """It is there again before training begins, and stands scaled."""
    paths = {after: tmp_path / f"{after}.ckpt" for after in (14, 20, 28)}

    def run(*more: Any, **how: Any) -> Any:
        scaling = LRScaling("adam-sde", reference_batch=REFERENCE)
        return finetuned(AccumulationSchedule({0: 2, 2: 8}), scaling, *more, **how)

    with pytest.warns(UserWarning, match=ADDED):
        whole = run(*(Saves(path, after) for after, path in paths.items()))
    for after, path in paths.items():
        rest = run(ckpt_path=path)
        assert 0 < len(rest.all_groups) < len(whole.all_groups)
        expected = whole.all_groups[-len(rest.all_groups) :]
        for found, wanted in zip(rest.all_groups, expected, strict=True):
            for group, other in zip(found, wanted, strict=True):
                for key in ("lr", "betas", "eps"):
                    assert group[key] == pytest.approx(other[key], rel=1e-12), after


def test_group_added_by_hand_has_the_optimizers_first_moments() -> None:
    """Negative control: without scaling it is torch's defaults that it takes."""
    module = finetuned(AccumulationSchedule({0: 2}))
    first, added = module.all_groups[-1]
    assert added["betas"] == first["betas"] == (0.99, 0.999)
