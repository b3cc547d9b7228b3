"""What changes while it trains, loader, windows, scheduler or groups; a second fit."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    LambdaCallback,
    StochasticWeightAveraging,
)
from torch import Tensor, nn
from torch.optim import SGD

from tests.helpers import trainer
from tests.lit.rates.scaled import (
    BATCHES,
    EXACT,
    MAKERS,
    REFERENCE,
    STEPS,
    Scheduled,
    adamw,
    data,
    deviation,
    fit,
    linear,
    plain,
    times,
)
from tests.zoo.callbacks import Saving
from tests.zoo.modules import hooked
from trainkit import (
    AccumulationCallback,
    AccumulationMixin,
    AccumulationSchedule,
    LRScaling,
    PerSample,
    Uniform,
)

# ---- another loader ------------------------------------------------------------------

SIZES = [3, 6, 1, 2]


class Reloads(Scheduled):
    """Its loader has another batch size in each epoch."""

    def train_dataloader(self) -> Any:
        return data(SIZES[self.trainer.current_epoch])


@pytest.mark.parametrize(
    ("name", "with_windows"), [("CosineAnnealingLR", False), ("OneCycleLR-cos", True)]
)
def test_curve_over_loaders_of_other_sizes_equals_each_factor(
    name: str | None, with_windows: bool
) -> None:
    module, scaling = Reloads(name), linear()
    callbacks: list[Any] = [AccumulationCallback(Uniform())] * with_windows
    how: dict[str, Any] = {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 4}
    trainer(2, callbacks=[scaling, *callbacks], **how).fit(module)
    factors = [2 * size / REFERENCE for size in SIZES for _ in range(STEPS)]
    assert deviation(module.curve, times(plain(name, 20), factors)) <= EXACT
    assert scaling.k == 2 * SIZES[-1] / REFERENCE


# ---- several optimizers, by hand -----------------------------------------------------


class ByHand(AccumulationMixin, pl.LightningModule):
    """Several optimizers, and their schedulers."""

    accumulation = PerSample()

    def __init__(self, number: int, schedule: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.schedule = schedule
        self.nets = nn.ModuleList(nn.Linear(1, 1) for _ in range(number))
        self.curve: list[list[float]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        schedulers: Any = self.lr_schedulers() or [None] * len(self.nets)
        made = zip(self.nets, optimizers, schedulers, strict=True)
        for index, (net, optimizer, scheduler) in enumerate(made):
            loss = net(batch.float()).square().mean()
            self.accumulate(loss, batch, optimizer=optimizer)
            if self.window_ends(batch_idx):
                self.curve.append([index, optimizer.param_groups[0]["lr"]])
                self.finish_window(optimizer)
                optimizer.step()
                optimizer.zero_grad()
                if scheduler is not None:
                    scheduler.step()

    def configure_optimizers(self) -> Any:
        makers = [SGD, torch.optim.Adam] if self.schedule else [SGD] * len(self.nets)
        pairs = zip(makers, self.nets, strict=True)
        optimizers = [make(net.parameters(), lr=0.05) for make, net in pairs]
        if not self.schedule:
            return optimizers, []
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[0], 7, 1e-3)
        return optimizers, [cosine, MAKERS["OneCycleLR-cos"](optimizers[1])]


@pytest.mark.parametrize("warmup", [0, 3])
def test_curves_of_two_optimizers_by_hand_equal_the_plain_ones(warmup: int) -> None:
    """Each by its own rule; Lightning counts the steps of both, a warm-up one's."""
    scaling = LRScaling("auto", reference_batch=REFERENCE, warmup_steps=warmup)
    module = fit(ByHand(2, schedule=True), scaling, window=2)
    reference = fit(ByHand(2, schedule=True), window=2)
    assert len(module.curve) == 20
    for index, factor in enumerate((4.0, 2.0)):
        shares = [min(step / warmup, 1) if warmup else 1.0 for step in range(10)]
        rising = [1 + (factor - 1) * share for share in shares]
        found, expected = (
            [[rate] for which, rate in each.curve if which == index]
            for each in (module, reference)
        )
        assert deviation(found, times(expected, rising)) <= EXACT
    assert [scaled.rule.name for scaled in scaling.scaled] == ["linear", "sqrt"]


def test_table_of_the_trainers_size_or_a_schedule_is_shown_once(capsys: Any) -> None:
    """A schedule says the sizes beforehand."""
    fit(ByHand(2), linear(), window=2)
    assert len(_after(capsys.readouterr().out, "step: ")) == 1
    schedule = AccumulationSchedule({0: 1, 1: 5})
    fit(Scheduled(None), AccumulationCallback(Uniform()), schedule, linear(), window=1)
    assert len(_after(capsys.readouterr().out, "learning rate: ")) == 1


def _after(text: str, label: str) -> list[str]:
    lines = text.splitlines()
    return [line.split(label, 1)[1] for line in lines if f"| {label}" in line]


# ---- StochasticWeightAveraging -------------------------------------------------------


class Averaged(Scheduled):
    """With a BatchNorm, for whose statistics an extra epoch is run."""

    def __init__(self, optimizer: Any = SGD) -> None:
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
    swa = StochasticWeightAveraging([0.03, 0.05], 2, annealing_epochs=2)
    ours = [AccumulationCallback(Uniform(), proof="off"), *callbacks, swa]
    return fit(Averaged(**how), *ours, window=window, max_epochs=5)


@cache
def unscaled_average() -> Any:
    return averaged()


@pytest.mark.parametrize("rule", ["linear", "adam-sde"])
def test_averaging_phase_equals_factor_times_the_plain_one(rule: Any) -> None:
    """It anneals from the rates it finds to rates of its own. The window of its epoch
    for statistics is the entire epoch: k would be 20, and 20 x 0.1 out of reach."""

    def small_beta(parameters: Any, **how: Any) -> Any:
        return adamw(parameters, **how, betas=(0.9, 0.999))

    optimizer = SGD if rule == "linear" else small_beta
    scaling = LRScaling(rule, reference_batch=REFERENCE)
    scaled, unscaled = averaged(scaling, optimizer=optimizer), unscaled_average()
    assert len(scaled.curve) == len(unscaled.curve) == 5 * STEPS + 1
    factor = 4.0 if rule == "linear" else 2.0
    expected = times(unscaled.curve, [factor] * len(unscaled.curve))
    assert deviation(scaled.curve, expected) <= EXACT
    assert unscaled.curve[-1][:2] == pytest.approx([0.03, 0.05])
    assert set(scaled.seen[-BATCHES - 1 :]) == {scaled.curve[-1][0]}
    assert scaling.k == 4.0
    for key in ("lr", "betas") if rule == "adam-sde" else ("lr",):
        assert scaled.end[key] == scaled.groups[-1][key]


def test_averaging_phase_over_a_schedule_equals_each_factor() -> None:
    """The window changes before the phase, within it, and after its annealing."""

    def schedule() -> AccumulationSchedule:
        return AccumulationSchedule({0: 1, 1: 5, 3: 2, 4: 10})

    scaled = averaged(schedule(), linear(), window=1)
    unscaled = averaged(schedule(), window=1)
    sizes = [1] * 10 + [5] * 4 + [2] * 5 + [10] * 2
    factors = [2.0 * size for size in sizes]
    assert deviation(scaled.curve, times(unscaled.curve, factors)) <= EXACT


# ---- groups that come later ----------------------------------------------------------


class Adds(BaseFinetuning):
    """Adds a group in the second epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            how: dict[str, Any] = {"lr": 0.01, "initial_denom_lr": 1.0}
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


def finetuned(*callbacks: Any, **how: Any) -> Any:
    scaling = LRScaling("sqrt", reference_batch=REFERENCE, weight_decay="sqrt")
    schedule = AccumulationSchedule({0: 2, 2: 8})
    ours = [AccumulationCallback(Uniform()), schedule, scaling, Adds(), *callbacks]
    return fit(Finetuned(), *ours, window=1, max_epochs=3, **how)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended")
def test_group_added_later_keeps_its_rate_and_follows_windows(tmp_path: Path) -> None:
    """And is there again, unchanged, in a run that is resumed."""
    path = tmp_path / "one.ckpt"
    module = finetuned(Saving(path, 13))
    rates = [[group["lr"] for group in groups] for groups in module.all_groups]
    expected = [[0.2]] * 5 + [[0.2, 0.01]] * 5 + [[0.4, 0.02]] * 2
    assert rates == [pytest.approx(row) for row in expected]
    for groups in module.all_groups:
        decay = 0.02 if len(groups) == 1 or groups[0]["lr"] < 0.3 else 0.04
        found = [group["weight_decay"] for group in groups]
        assert found == pytest.approx([decay] * len(groups))
    rest = finetuned(ckpt_path=path)
    for found, wanted in zip(rest.all_groups, module.all_groups[7:], strict=True):
        for group, other in zip(found, wanted, strict=True):
            for key in ("lr", "betas", "eps", "weight_decay"):
                assert group[key] == other[key]


# ---- the same again ------------------------------------------------------------------


class Keeps(Scheduled):
    """Returns the same optimizer for each `fit`, under a new scheduler."""

    kept: Any = None

    def configure_optimizers(self) -> Any:
        self.kept = self.kept or super().configure_optimizers()["optimizer"]
        scheduler = torch.optim.lr_scheduler.ExponentialLR(self.kept, 1.0)
        return [self.kept], [scheduler]


@pytest.mark.parametrize("ends", ["well", "by an exception"])
@pytest.mark.parametrize("again", ["same callback", "another callback"])
def test_second_fit_is_scaled_once(ends: str, again: str) -> None:
    """The rates of the first are still there for those who look at its end."""

    def end(trainer: Any, pl_module: Any) -> None:
        if ends != "well":
            raise KeyError("a user's mistake")

    module, scaling = Keeps("ExponentialLR"), linear()
    with nullcontext() if ends == "well" else pytest.raises(KeyError):
        fit(module, scaling, LambdaCallback(on_train_epoch_end=end))
    assert module.kept.param_groups[0]["lr"] == pytest.approx(0.2)
    fit(module, scaling if again == "same callback" else linear())
    assert {round(row[0], 12) for row in module.curve} == {0.2}


def test_development_run_is_scaled_and_validation_alone_is_not() -> None:
    validates = hooked(Scheduled, validation_step=lambda self, batch, batch_idx: None)
    module = fit(Scheduled(None), linear(), fast_dev_run=True)
    assert deviation(module.curve, times(plain(None, 1), [2.0])) <= EXACT
    scaling = linear()
    trainer(callbacks=[scaling]).validate(validates(None), data())
    assert scaling.effective_batch is None
