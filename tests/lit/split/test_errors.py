"""Errors of the user's own code inside a window: they come through, and say where."""

from __future__ import annotations

import sys
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from tests.helpers import trainer
from tests.lit.fronts import plain_token_loss
from tests.lit.split.common import (
    CUTS,
    FIXED,
    SEQUENCES,
    Split,
    fit,
    loader_batches,
    pad_and_mask,
)
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.errors import TrainkitError
from trainkit.lit.split import errors

pytestmark = pytest.mark.filterwarnings("ignore:accumulation. an open window")


# ---- self.log, and StopIteration, on the way to the device ---------------------------


class InHook(Split):
    """Does something in one of the hooks on the way to the device."""

    hook = "on_after_batch_transfer"
    begins = 5

    def act(self, hook: str) -> None:
        if hook == self.hook:
            self.log("mine", 1.0)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.act("on_before_batch_transfer")
        return batch

    def transfer_batch_to_device(
        self, batch: Any, device: Any, dataloader_idx: int
    ) -> Any:
        self.act("transfer_batch_to_device")
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.act("on_after_batch_transfer")
        return batch


HOOKS = [
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
]


@pytest.mark.parametrize("cut", [FIXED, MicroBatching("auto"), None], ids=str)
@pytest.mark.parametrize("hook", HOOKS)
def test_logs_on_the_way_are_refused_as_lightning_does(hook: str, cut: Any) -> None:
    module = InHook(cut=cut)
    module.hook = hook
    text = rf"^You can't `self.log\(\)` inside `{hook}`"
    with pytest.raises(MisconfigurationException, match=text):
        fit(module)


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader_batches()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert self.trainer is not None
        self.trainer.lightning_module.log("mine", 1.0)
        return batch


def test_logs_of_a_data_module_are_refused_as_lightning_does() -> None:
    said = []
    for cut in (FIXED, None):
        with pytest.raises(RuntimeError, match="batch_to_device") as raised:
            trainer(1).fit(Split(cut=cut), datamodule=Data())
        said.append(str(raised.value))
    assert said[0] == said[1]


class Ending(InHook):
    num_calls = 0

    def act(self, hook: str) -> None:
        self.num_calls += hook == self.hook
        if self.num_calls == self.begins:
            next(iter([]))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.act("training_step")
        return super().training_step(batch, batch_idx)


AUTO = MicroBatching("auto")
OF_TRANSFER = "a hook of the transfer"


@pytest.mark.parametrize(
    ("hook", "name", "cut", "begins"),
    [  # every pair; the first micro-batch, a last, and a first again
        ("transfer_batch_to_device", OF_TRANSFER, FIXED, 1),
        ("transfer_batch_to_device", OF_TRANSFER, AUTO, 4),
        ("transfer_batch_to_device", OF_TRANSFER, FIXED, 5),
        ("on_after_batch_transfer", OF_TRANSFER, AUTO, 1),
        ("on_after_batch_transfer", OF_TRANSFER, FIXED, 4),
        ("on_after_batch_transfer", OF_TRANSFER, AUTO, 5),
        ("training_step", "training_step", AUTO, 1),
        ("training_step", "training_step", FIXED, 1),
        ("training_step", "training_step", FIXED, 4),
        ("training_step", "training_step", AUTO, 5),
    ],
)
def test_stop_iteration_is_an_error(
    hook: str, name: str, cut: MicroBatching, begins: int
) -> None:
    module = Ending(cut=cut)
    module.hook, module.begins = hook, begins
    with pytest.raises(TrainkitError, match=f"^{name}: it raised StopIteration") as r:
        fit(module)
    assert isinstance(r.value.__cause__, StopIteration)


# ---- the note ------------------------------------------------------------------------


class Failing(Split):
    """Does not match sizes, in the second micro-batch."""

    error: BaseException | None = None
    num_calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.num_calls += 1
        if self.num_calls == 2:
            if self.error is not None:
                raise self.error
            return torch.zeros(3) + torch.zeros(4)
        return plain_token_loss(self.net, batch)


def note_of(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


pytest_notes = pytest.mark.skipif(sys.version_info < (3, 11), reason="no notes")


@pytest_notes
@pytest.mark.parametrize(
    "cut", [CUTS["rows"], FIXED, MicroBatching("auto", start=60)], ids=str
)
def test_an_error_says_how_its_batch_was_cut(cut: MicroBatching) -> None:
    module = Failing(cut=cut)
    with pytest.raises(RuntimeError, match="must match the size") as raised:
        fit(module)
    note = note_of(raised.value)
    assert "micro-batch 2 of " in note
    assert "of a loader batch of 14 rows: dict(ids: int64[" in note
    assert "shared=" in note
    assert "Columns that are only padding in it were left out" in note
    assert "trim=False" in note
    assert "lengths=" in note


@pytest_notes
def test_the_note_says_nothing_of_trimming_where_nothing_was_trimmed() -> None:
    with pytest.raises(RuntimeError, match="must match the size") as raised:
        fit(Failing(cut=MicroBatching(size=4, trim=False)))
    assert "micro-batch 2 of 4" in note_of(raised.value)
    assert "trim" not in note_of(raised.value)


@pytest_notes
def test_a_batch_that_is_one_micro_batch_has_no_note() -> None:
    module = Failing(cut=MicroBatching(size=100))
    with pytest.raises(RuntimeError, match="must match the size") as raised:
        fit(module)
    assert not note_of(raised.value)


@pytest_notes
@pytest.mark.parametrize(
    "error",
    [
        TrainkitError("mine"),
        torch.OutOfMemoryError("CUDA out of memory"),
        KeyboardInterrupt(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_these_have_no_note(error: BaseException) -> None:
    module = Failing()
    module.error = error
    with pytest.raises(BaseException) as raised:  # noqa: PT011
        fit(module)
    assert not note_of(raised.value)


class Slotted(Exception):
    """Takes no notes, as on Python 3.10."""

    add_note = property()  # type: ignore[assignment]


@pytest.mark.parametrize("breaks", [True, False])
def test_the_note_never_hides_the_error(
    breaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Failing()
    module.error = ValueError("mine") if breaks else Slotted("mine")
    if breaks:
        monkeypatch.setattr(errors, "describe", lambda batch: 1 / 0)
    with pytest.raises(type(module.error), match="mine") as raised:
        fit(module)
    assert raised.value is module.error
    assert not note_of(raised.value)


@pytest_notes
def test_a_list_of_samples_is_described_as_collated() -> None:
    module = Failing(cut=MicroBatching(size=4, collate=pad_and_mask))
    lists = DataLoader(SEQUENCES, batch_size=16, collate_fn=list)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="must match the size") as raised:
        trainer(1).fit(module, lists)
    assert "micro-batch 2 of 4, the rows" in note_of(raised.value)
    assert "trim" not in note_of(raised.value)
