"""What no size can be found for is refused by name, and the size is set where its owner
keeps it."""

from __future__ import annotations

import threading
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from tests.helpers import loader, ragged_sequences
from tests.lit.probe.finding import MAKERS, Data, HparamsData, Net, found, quick, rows
from tests.zoo.modules import Manual, hooked
from trainkit import (
    AccumulationCallback,
    AccumulationSchedule,
    MicroBatching,
    PerSample,
    check,
)
from trainkit.errors import TrainkitError
from trainkit.lit.probe.setting import find_setting


def of(batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(rows(), batch_size)  # type: ignore[arg-type]


def cut_by(kind: Any) -> DataLoader[Any]:
    sampler = kind(SequentialSampler(rows()), 4, drop_last=False)
    return DataLoader(rows(), batch_sampler=sampler)  # type: ignore[arg-type]


class PrivateLoader(Net):
    """Keeps the size in its hyperparameters, and shows it as an attribute."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()

    @property
    def batch_size(self) -> int:
        return self.hparams["batch_size"]

    def train_dataloader(self) -> Any:
        return of(self.batch_size)


class Both(pl.LightningDataModule):
    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return of(self.batch_size)


def test_an_attribute_and_its_hyperparameter_stay_the_same() -> None:
    both = Both()
    setting = find_setting(Net(), both, "batch_size")
    assert (setting.read(), setting.text) == (4, "Both.batch_size")
    setting.write(8)
    assert (both.batch_size, both.hparams["batch_size"]) == (8, 8)


def test_a_module_with_its_own_loader() -> None:
    module, fit = PrivateLoader(), quick(max_epochs=1)
    plan = found(module, None, fit, max_micro_batch=8).plan
    assert module.batch_size == plan.micro_batch
    fit.fit(module)
    assert set(module.sizes) == {plan.micro_batch}


def test_under_another_name() -> None:
    data: Any = hooked(Data, train_dataloader=lambda self: of(self.train_size))()
    data.train_size = 4
    plan = found(Net(), data, attribute="train_size", max_micro_batch=8).plan
    assert (data.train_size, data.batch_size) == (plan.micro_batch, 4)


@pytest.mark.parametrize("kind", ["loader", "resumable"])
def test_a_loader_cuts_by_the_size_that_was_written(kind: str) -> None:
    loader = MAKERS[kind](4)
    find_setting(Net(), loader, "batch_size").write(16)
    assert [len(x) for x, _ in loader] == [16] * 6
    assert len(loader) == 6
    fit, module = quick(max_epochs=1), Net()
    fit.fit(module, loader)  # Lightning makes loaders anew
    assert module.sizes == [16] * 6


def test_a_plain_batch_sampler_is_a_size() -> None:
    loader = cut_by(BatchSampler)
    plan = found(Net(), loader, max_micro_batch=8).plan
    module = Net()
    quick(max_epochs=1).fit(module, loader)
    assert set(module.sizes) == {plan.micro_batch}


def mistaken(self: Any, batch: Any, batch_idx: int) -> Any:
    raise KeyError("labels")


@pytest.mark.parametrize("make", [Data, HparamsData, Both])
def test_a_search_that_fails_leaves_the_size(make: Any) -> None:
    data = make(4)
    with pytest.raises(KeyError, match="labels"):
        found(hooked(Net, training_step=mistaken)(), data)
    assert find_setting(Net(), data, "batch_size").read() == 4
    assert data.train_dataloader().batch_size == 4


def test_a_fit_aside_takes_a_trainers_number_beside_manual_optimization() -> None:
    """Which Lightning refuses, but while the callback of windows holds it."""
    data, live = loader(ragged_sequences(8), 2), quick(4)
    check(Manual(), data, trainer=live).assert_exact()
    assert live.accumulate_grad_batches == 4


# ---- what is refused by name ---------------------------------------------------------


class Buckets(BatchSampler):
    pass


def terms(self: Any, batch: Any, batch_idx: int) -> Any:
    loss = Net.training_step(self, batch, batch_idx)
    return {"loss": {"ce": loss, "kl": loss}}


def holding(**held: Any) -> Net:
    module = Net()
    for name, value in held.items():
        setattr(module, name, value)
    return module


def looped() -> Net:
    """The default of a function is no part of a copy."""
    module = hooked(Net, training_step=lambda self, batch: self.step(batch))()
    module.step = lambda batch, own=module: own.net(batch[0]).mean()  # type: ignore[attr-defined]
    return module


DEAF = hooked(Data, train_dataloader=lambda self: of(4))
SILENT = hooked(pl.LightningDataModule, train_dataloader=lambda self: of(4))
SEVERAL = hooked(Data, train_dataloader=lambda self: [of(4), of(4)])
FIXED = hooked(Data, rows_each=property(lambda self: 4))
CUTTING = AccumulationCallback(PerSample(), micro_batching=MicroBatching(size=2))
ON_A_COPY = "find_micro_batch: sizes are tried on a copy of the module, and"
# By what is said: the data, the module, options of its Trainer, and of the search.
REFUSED: dict[str, dict[str, Any]] = {
    r"Data.batch_size was set to 1, but .* is 4. Let": {"data": DEAF()},
    r"Data.batch_size was set to 2, but .* is 4. Let": {"data": DEAF(1)},
    "LightningDataModule has neither batch_size nor hparams.ba": {"data": SILENT()},
    "Net has neither batch_size": {"data": None},
    "must be a whole number from 1 to .*, received 0": {"data": Data(0)},
    "must be a whole number from 1 to .*, received True": {"data": Data(True)},
    "Data.rows_each cannot be set": {"data": FIXED(), "attribute": "rows_each"},
    "or one DataLoader with batch_size=, received list": {"data": SEVERAL()},
    "a LightningDataModule or one DataLoader .* received list": {"data": [1, 2]},
    "whose batches are cut by Buckets": {"data": cut_by(Buckets)},
    "whose batches are cut by batch_size=None": {
        "data": DataLoader(rows(), batch_size=None)  # type: ignore[arg-type]
    },
    "Net optimizes manually": {"module": hooked(Net, automatic_optimization=False)()},
    "Net.micro_batching cuts loader batches by itself": {
        "module": hooked(Net, micro_batching="auto")()
    },
    "AccumulationCallback.micro_batching cuts loader": {"callbacks": [CUTTING]},
    r"returned the terms \['ce', 'kl'\]": {
        "module": hooked(Net, training_step=terms)()
    },
    f"{ON_A_COPY} head.weight gets its shape": {
        "module": holding(head=torch.nn.LazyLinear(1))
    },
    rf"{ON_A_COPY} Net.lock \(lock\) cannot be copied: .* by hand": {
        "module": holding(lock=threading.Lock())
    },
    f"{ON_A_COPY} something in the copy refers to the module": {"module": looped()},
    "GradientAccumulationScheduler changes accumulate_grad_batches": {
        "callbacks": [GradientAccumulationScheduler({1: 2})]
    },
    "AccumulationSchedule changes accumulate_grad_batches": {
        "callbacks": [AccumulationSchedule({0: 2})]
    },
    "DDPStrategy trains in processes that end": {
        "strategy": DDPStrategy(start_method="fork"),
        "devices": 2,
    },
    "target: must be a whole number": {"target": 0},
    "max_micro_batch: must be a whole number": {"max_micro_batch": 1.5},
    r"margin: must be a share from 0 to below 1, received 1\.0": {"margin": 1.0},
    "the Trainer ran no batch, so": {"limit_train_batches": 0},
    "the Trainer ran no batch": {"max_steps": 0},
}
OF_THE_SEARCH = ("target", "max_micro_batch", "margin", "attribute")


@pytest.mark.parametrize("said", REFUSED)
@pytest.mark.filterwarnings("ignore:.*Lazy modules.*")
@pytest.mark.filterwarnings("ignore:.*`max_steps=0`.*", "ignore:.*max_epochs=0.*")
def test_where_no_size_can_be_found_it_is_refused_by_name(said: str) -> None:
    how = {"data": Data(), "module": Net(), **REFUSED[said]}
    data, module = how.pop("data"), how.pop("module")
    options = {name: how.pop(name) for name in OF_THE_SEARCH if name in how}
    with pytest.raises(TrainkitError, match=said):
        found(module, data, quick(**how), **options)
