"""What reaches the device must weigh what was told before, in every window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from tests.helpers import NAIVE, TOLERANCE, deviation, trainer
from tests.lit.fronts import Plain
from tests.lit.split.common import (
    FIXED,
    SEQUENCES,
    SIZES,
    START,
    Split,
    fit,
    loader_batches,
    pad_and_mask,
)
from trainkit import AccumulationCallback, AccumulationStrategy, PerToken
from trainkit.core.checks import LateReading
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.errors import TrainkitError
from trainkit.lit.split import arriving

pytestmark = pytest.mark.filterwarnings("ignore:accumulation. an open window")

HOOKS = ["transfer_batch_to_device", "on_after_batch_transfer"]


def masked(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """As masked models do: long rows lose more than short ones."""
    labels = batch["labels"].clone()
    labels[:, 2:] = -100
    return {**batch, "labels": labels}


class Masking(Split):
    """Makes another selection of labels on the device, from a step on."""

    begins = 1
    hook = HOOKS[1]

    def changed(self, batch: Any) -> Any:
        begun = self.trainer.training and self.trainer.global_step >= self.begins
        return masked(batch) if begun else batch

    def transfer_batch_to_device(
        self, batch: Any, device: Any, dataloader_idx: int
    ) -> Any:
        batch = super().transfer_batch_to_device(batch, device, dataloader_idx)
        return self.changed(batch) if self.hook == HOOKS[0] else batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.changed(batch) if self.hook == HOOKS[1] else batch


class Data(pl.LightningDataModule):
    """The same, in the data module."""

    def train_dataloader(self) -> Any:
        return loader_batches()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return masked(batch) if self.trainer.global_step >= 1 else batch  # type: ignore[union-attr]


TEXT = (
    r"PerToken: at optimizer step {} .counted from 0. a micro-batch weighed \d+ before "
    r"it went to the device, and weighs \d+ after .* on_before_batch_transfer"
)


@pytest.mark.parametrize("cut", [FIXED, MicroBatching("auto")], ids=["size", "auto"])
@pytest.mark.parametrize("hook", HOOKS)
def test_labels_masked_from_some_step_on_are_refused(hook: str, cut: Any) -> None:
    module = Masking(cut=cut)
    module.hook = hook
    with pytest.raises(TrainkitError, match=TEXT.format(1)):
        fit(module)


def test_labels_masked_by_the_data_module_are_refused() -> None:
    with pytest.raises(TrainkitError, match=TEXT.format(1)):
        trainer(1).fit(Split(), datamodule=Data())


def test_labels_masked_for_a_callback_are_refused() -> None:
    callback = AccumulationCallback(PerToken(), micro_batching=FIXED)
    module = Foreign()
    with pytest.raises(TrainkitError, match=TEXT.format(1)):
        fit(module, callback)


class Foreign(Plain):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return masked(batch) if self.trainer.global_step >= 1 else batch


def test_without_the_comparison_the_steps_would_be_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arriving.Arrivals, "check", lambda *args: None)
    module, whole = Masking(), Masking(cut=None)
    for each in (module, whole):
        fit(each)
    assert deviation(module, whole, START) > NAIVE


def test_masked_before_the_cut_equals_whole_batches() -> None:
    class Early(Split):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return masked(batch) if self.trainer.global_step >= 1 else batch

    module, whole = Early(), Early(cut=None)
    for each in (module, whole):
        fit(each)
    assert deviation(module, whole, START) <= TOLERANCE[torch.float64]


# ---- what is on a device is read later -----------------------------------------------


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if CPU tensors could not be read without waiting."""
    arrived = property(lambda self: self.was_asked or setattr(self, "was_asked", True))
    slow = type("Slow", (LateReading,), {"was_asked": False, "arrived": arrived})
    monkeypatch.setattr(arriving, "LateReading", slow)


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize(("begins", "steps"), [(1, 2), (2, 3), (5, 6)])
def test_what_is_on_a_device_is_read_in_a_later_window(begins: int, steps: int) -> None:
    """Or where the epoch ends; the step has been taken by then, which is said."""
    module, fitted = Masking(), trainer(1)
    module.begins = begins
    text = TEXT.format(begins) + ".*The step was taken with it; resume"
    with pytest.raises(TrainkitError, match=text):
        fitted.fit(module, loader_batches())
    assert fitted.global_step == steps


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("checks", ["late", "now"])
def test_nothing_is_taken_in_the_first_window_or_with_checks_now(checks: str) -> None:
    module, fitted = Masking(), trainer(1)
    module.checks = checks  # type: ignore[assignment]
    module.begins = 0 if checks == "late" else 2
    with pytest.raises(TrainkitError, match=TEXT.format(module.begins)) as raised:
        fitted.fit(module, loader_batches())
    assert fitted.global_step == module.begins
    assert "was taken" not in str(raised.value)


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("window", [1, 2])
def test_what_weighs_the_same_on_a_device_trains(window: int) -> None:
    module, untouched = Masking(), Split()
    module.begins = 1000
    for each in (module, untouched):
        fit(each, window=window)
    assert deviation(module, untouched, START) == 0


# ---- what is compared ----------------------------------------------------------------


@dataclass(frozen=True)
class Counting(AccumulationStrategy):
    """Counts how often it is asked."""

    asked: list[int]

    def weight(self, batch: Any) -> Any:
        self.asked.append(len(batch["ids"]))
        return PerToken().weight(batch)


@pytest.mark.parametrize("has_hook", [True, False])
def test_nothing_is_weighed_twice_where_nobody_has_a_hook(has_hook: bool) -> None:
    strategy = Counting([])
    module = (Masking if has_hook else Split)(strategy=strategy)
    if has_hook:
        module.begins = 1000  # type: ignore[attr-defined]
    fit(module, max_epochs=1)
    of_parts = [rows for rows in strategy.asked if rows <= 4]
    assert sum(of_parts) == sum(SIZES) * (1 + has_hook)


def test_what_becomes_something_else_is_not_compared() -> None:
    class Packing(Split):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [batch]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch[0], batch_idx)

    module, whole = Packing(), Split(cut=None)
    for each in (module, whole):
        fit(each)
    assert deviation(module, whole, START) <= TOLERANCE[torch.float64]


@pytest.mark.parametrize("is_count", [True, False])
def test_a_mask_may_be_rounded_on_the_way_and_a_count_may_not(is_count: bool) -> None:
    """One label of three hundred, or what a cast to half precision leaves of 0.1."""

    class Rounding(Split):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            if is_count:
                labels = batch["labels"].clone()
                labels[0, 0] = -100
                return {**batch, "labels": labels}
            return {**batch, "weights": batch["weights"].bfloat16()}

    def collate(samples: Any) -> Any:
        batch = pad_and_mask(samples * 40)
        return {**batch, "weights": 0.1 * batch["attention_mask"].double()}

    data = torch.utils.data.DataLoader(SEQUENCES, 8, collate_fn=collate)  # type: ignore[arg-type]
    strategy = PerToken() if is_count else PerToken(mask="weights")
    module = Rounding(strategy=strategy, cut=MicroBatching(size=160))
    if is_count:
        with pytest.raises(TrainkitError, match=TEXT.format(0)):
            trainer(1).fit(module, data)
    else:
        trainer(1).fit(module, data)
