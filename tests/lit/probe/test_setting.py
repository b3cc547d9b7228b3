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

from tests.lit.probe.finding import MAKERS, Data, HparamsData, Net, found, quick, rows
from trainkit import (
    AccumulationCallback,
    AccumulationSchedule,
    MicroBatching,
    PerSample,
)
from trainkit.errors import TrainkitError
from trainkit.lit.probe.setting import find_setting


class PrivateLoader(Net):
    """Keeps the size in its hyperparameters, and shows it as an attribute."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()

    @property
    def batch_size(self) -> int:
        return self.hparams["batch_size"]

    def train_dataloader(self) -> Any:
        return DataLoader(rows(), self.batch_size)  # type: ignore[arg-type]


class Both(pl.LightningDataModule):
    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return DataLoader(rows(), self.batch_size)  # type: ignore[arg-type]


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
    class Named(Data):
        def __init__(self) -> None:
            super().__init__(4)
            self.train_size = 4

        def train_dataloader(self) -> Any:
            return DataLoader(rows(), self.train_size)  # type: ignore[arg-type]

    data = Named()
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
    sampler = BatchSampler(SequentialSampler(rows()), 4, drop_last=False)
    loader = DataLoader(rows(), batch_sampler=sampler)  # type: ignore[arg-type]
    plan = found(Net(), loader, max_micro_batch=8).plan
    module = Net()
    quick(max_epochs=1).fit(module, loader)
    assert set(module.sizes) == {plan.micro_batch}


class Buckets(BatchSampler):
    pass


def cut_by_buckets() -> Any:
    sampler = Buckets(SequentialSampler(rows()), 4, drop_last=False)
    return DataLoader(rows(), batch_sampler=sampler)  # type: ignore[arg-type]


class Deaf(Data):
    def train_dataloader(self) -> Any:
        return DataLoader(rows(), 4)  # type: ignore[arg-type]


class Silent(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(rows(), 4)  # type: ignore[arg-type]


class Fixed(Data):
    @property
    def rows_each(self) -> int:
        return 4


class Several(Data):
    def train_dataloader(self) -> Any:
        return [super().train_dataloader(), super().train_dataloader()]


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (Deaf(), {}, r"Deaf.batch_size was set to 1, but .* is 4. Let"),
        (Deaf(1), {}, r"Deaf.batch_size was set to 2, but .* is 4. Let"),
        (Silent(), {}, r"Silent has neither batch_size nor hparams.batch_size"),
        (None, {}, r"Net has neither batch_size"),
        (Data(0), {}, "must be a whole number from 1 to .*, received 0"),
        (Data(True), {}, "must be a whole number from 1 to .*, received True"),
        (Fixed(), {"attribute": "rows_each"}, "Fixed.rows_each cannot be set"),
        (
            Several(),
            {},
            "a LightningDataModule or one DataLoader with batch_size=, received list",
        ),
        ([1, 2], {}, "one DataLoader with batch_size=, received list"),
        (cut_by_buckets(), {}, "cut by Buckets"),
        (DataLoader(rows(), batch_size=None), {}, "cut by batch_size=None"),  # type: ignore[arg-type]
    ],
)
def test_what_has_no_place_is_refused_by_name(
    data: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(TrainkitError, match=message):
        found(Net(), data, **options)


@pytest.mark.parametrize("make", [Data, HparamsData, Both])
def test_a_search_that_fails_leaves_the_size(make: Any) -> None:
    class Mistaken(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise KeyError("labels")

    data = make(4)
    with pytest.raises(KeyError, match="labels"):
        found(Mistaken(), data)
    assert find_setting(Net(), data, "batch_size").read() == 4
    loader = data.train_dataloader()
    assert loader.batch_size == 4


# ---- refused before anything has begun ----------------------------------------------


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Splitting(Net):
    micro_batching = "auto"


class Lazy(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.LazyLinear(1)


class Locked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Looped(Net):
    """The default of a function is no part of a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.step = lambda batch, own=self: own.net(batch[0]).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(batch)


class Terms(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": {"ce": loss, "kl": loss}}


CUTTING = AccumulationCallback(PerSample(), micro_batching=MicroBatching(size=2))
NO_BATCH = "the Trainer ran no batch"
# The module, options of its Trainer and of the search, and what is said.
REFUSED: dict[str, tuple[type[Net], dict[str, Any], dict[str, Any], str]] = {
    "manual": (Manual, {}, {}, "Manual optimizes manually"),
    "splits": (
        *(Splitting, {}, {}),
        "Splitting.micro_batching cuts loader batches by itself",
    ),
    "lazy": (Lazy, {}, {}, "on a copy .*, and head.weight gets its shape in the first"),
    "no copy": (Locked, {}, {}, r"Locked.lock \(lock\) cannot be copied: .* by hand"),
    "half a copy": (Looped, {}, {}, "something in the copy refers to the module"),
    "terms": (Terms, {}, {}, r"returned the terms \['ce', 'kl'\]"),
    "a callback that cuts": (
        *(Net, {"callbacks": [CUTTING]}, {}),
        "AccumulationCallback.micro_batching cuts loader batches by itself",
    ),
    "Lightning's schedule": (
        *(Net, {"callbacks": [GradientAccumulationScheduler({1: 2})]}, {}),
        "GradientAccumulationScheduler changes accumulate_grad_batches",
    ),
    "a schedule": (
        *(Net, {"callbacks": [AccumulationSchedule({0: 2})]}, {}),
        "AccumulationSchedule changes accumulate_grad_batches",
    ),
    "processes that end with fit": (
        *(Net, {"strategy": DDPStrategy(start_method="fork"), "devices": 2}, {}),
        "DDPStrategy trains in processes that end",
    ),
    "target": (Net, {}, {"target": 0}, "target: must be a whole number"),
    "max_micro_batch": (
        *(Net, {}, {"max_micro_batch": 1.5}),
        "max_micro_batch: must be a whole number",
    ),
    "margin": (
        *(Net, {}, {"margin": 1.0}),
        r"margin: must be a share from 0 to below 1, received 1\.0",
    ),
    "no batches": (Net, {"limit_train_batches": 0}, {}, NO_BATCH),
    "no steps": (Net, {"max_steps": 0}, {}, NO_BATCH),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:.*Lazy modules.*")
@pytest.mark.filterwarnings("ignore:.*`max_steps=0`.*", "ignore:.*max_epochs=0.*")
def test_where_no_size_can_be_found_it_is_refused_by_name(name: str) -> None:
    kind, of_trainer, options, message = REFUSED[name]
    with pytest.raises(TrainkitError, match=message):
        found(kind(), Data(), quick(**of_trainer), **options)
