"""Where no size can be found, it is said by name, and before anything has begun."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy

from tests.lit.probe.finding import Data, Net, found, quick
from trainkit import (
    AccumulationCallback,
    AccumulationSchedule,
    MicroBatching,
    PerSample,
)
from trainkit.errors import TrainkitError


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Splitting(Net):
    micro_batching = "auto"


class Fetching(Net):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return None


class Lazy(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.LazyLinear(1)


class Terms(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": {"ce": loss, "kl": loss}}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Manual, "Manual optimizes manually"),
        (Splitting, "Splitting.micro_batching cuts loader batches by itself"),
        (Fetching, r"Fetching.training_step\(dataloader_iter\) fetches its batches"),
        (Lazy, "head.weight gets its shape in the first forward pass"),
        (Terms, r"returned the terms \['ce', 'kl'\]"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*dataloader_iter.*")
@pytest.mark.filterwarnings("ignore:.*Lazy modules.*")
def test_a_module_that_leaves_no_size_to_find(kind: type[Net], message: str) -> None:
    with pytest.raises(TrainkitError, match=message):
        found(kind(), Data())


def test_a_callback_that_cuts_loader_batches() -> None:
    cutting = AccumulationCallback(PerSample(), micro_batching=MicroBatching(size=2))
    message = "AccumulationCallback.micro_batching cuts loader batches by itself"
    with pytest.raises(TrainkitError, match=message):
        found(Net(), Data(), quick(callbacks=[cutting]))


@pytest.mark.parametrize(
    "callback", [GradientAccumulationScheduler({1: 2}), AccumulationSchedule({0: 2})]
)
def test_a_schedule_of_its_own(callback: pl.Callback) -> None:
    message = f"{type(callback).__name__} changes accumulate_grad_batches"
    with pytest.raises(TrainkitError, match=message):
        found(Net(), Data(), quick(callbacks=[callback]))


def test_processes_that_end_with_fit() -> None:
    fit = quick(strategy=DDPStrategy(start_method="fork"), devices=2)
    with pytest.raises(TrainkitError, match="DDPStrategy trains in processes that end"):
        found(Net(), Data(), fit)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": 0}, "target: must be a whole number"),
        ({"max_micro_batch": 1.5}, "max_micro_batch: must be a whole number"),
        ({"num_batches": 0}, "num_batches: must be a whole number"),
        ({"margin": 1.0}, r"margin: must be a share from 0 to below 1, received 1\.0"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainkitError, match=message):
        found(Net(), Data(), **options)


@pytest.mark.parametrize("options", [{"limit_train_batches": 0}, {"max_steps": 0}])
@pytest.mark.filterwarnings("ignore:.*`max_steps=0`.*", "ignore:.*max_epochs=0.*")
def test_a_trainer_that_runs_no_batch(options: dict[str, Any]) -> None:
    with pytest.raises(TrainkitError, match="the Trainer ran no batch"):
        found(Net(), Data(), quick(**options))
