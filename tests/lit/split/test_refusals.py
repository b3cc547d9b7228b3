"""What a split window cannot be is refused by name."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.helpers import NAIVE, TOLERANCE, deviation, trainer, weights
from tests.lit.fronts import plain_token_loss
from tests.lit.split.common import (
    FIXED,
    SEQUENCES,
    START,
    Split,
    fit,
    loader_batches,
    pad_and_mask,
)
from trainkit import AccumulationStrategy, PerSample, PerToken, Uniform
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.errors import TrainkitError

pytestmark = pytest.mark.filterwarnings("ignore:accumulation. an open window")


def refused(module: Any, match: str, **options: Any) -> None:
    with pytest.raises(TrainkitError, match=match):
        fit(module, **options)
    assert "log" not in vars(module)


# ---- before training -----------------------------------------------------------------


@pytest.mark.parametrize("options", [4, {"size": 4}, "auto"])
def test_wrong_type_is_refused(options: Any) -> None:
    module = Split()
    module.micro_batching = options
    refused(module, r"micro_batching: must be a MicroBatching, received .*size=4")


class Manual(Split):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = plain_token_loss(self.net, batch)
        self.accumulate(loss, batch)
        self.finish_window()


def test_manual_optimization_is_refused() -> None:
    refused(Manual(), "with automatic_optimization=False Manual runs its own")


class Fetching(Split):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return plain_token_loss(self.net, batch)


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`:UserWarning")
def test_dataloader_iter_is_refused() -> None:
    refused(Fetching(strategy=PerSample()), r"training_step\(dataloader_iter\)")


def test_uniform_is_refused_where_the_cut_may_change() -> None:
    """What it counts is what is cut at will."""
    auto = MicroBatching("auto")
    refused(Split(strategy=Uniform(), cut=auto), r"Uniform\(\) counts micro-batches")
    refused(
        Split(strategy={"ce": PerToken(), "aux": Uniform()}, cut=auto),
        r"Uniform\(\) counts micro-batches",
    )


def test_uniform_is_announced_and_is_the_mean_of_means() -> None:
    """For comparison with the big batch, which it is not."""
    off = {}
    for name, cut in {"fours": FIXED, "rows": MicroBatching(size=1)}.items():
        module = Split(strategy=Uniform(), cut=cut)
        with pytest.warns(UserWarning, match="micro_batching: Uniform.. weighs micro-"):
            fit(module)
        exact = Split(cut=cut)
        fit(exact)
        off[name] = deviation(module, exact, START)
    assert min(off.values()) > NAIVE
    assert off["fours"] != off["rows"]


# ---- in the first window -------------------------------------------------------------


@dataclass(frozen=True)
class Longest(AccumulationStrategy):
    """No sum over rows."""

    def weight(self, batch: Any) -> Tensor:
        return (batch["labels"] != -100).sum(1).max()


def test_weights_that_do_not_add_up_are_refused() -> None:
    text = "Longest: what micro-batches weigh must add up .* Let weight.. return a sum"
    refused(Split(strategy=Longest()), text)


def test_batch_that_cannot_be_cut_is_refused_with_its_structure() -> None:
    class Odd(Split):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            batch["other"] = torch.zeros(14).to_sparse()

    refused(Odd(), r"field 'other' is a torch.sparse_coo tensor, whose rows cannot be")


def test_what_every_micro_batch_gets_whole_is_said_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Odd(Split):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            batch["other"] = torch.zeros(3)

    fit(Odd())
    said = "trainkit | split: every micro-batch gets all of 'other'"
    assert capsys.readouterr().out.count(said) == 1


# ---- hooks on the way to the device --------------------------------------------------


class Changed(Split):
    """Changes batches in one of the module's hooks, in a way that rows can bear."""

    hook = "on_after_batch_transfer"

    def changed(self, batch: Any) -> Any:
        if not isinstance(batch, dict):
            return batch
        return {**batch, "ids": (batch["ids"] + 1) % 13}

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.changed(batch) if self.hook.startswith("on_before") else batch

    def transfer_batch_to_device(
        self, batch: Any, device: Any, dataloader_idx: int
    ) -> Any:
        batch = super().transfer_batch_to_device(batch, device, dataloader_idx)
        return self.changed(batch) if self.hook.startswith("transfer") else batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.changed(batch) if self.hook.startswith("on_after") else batch


HOOKS = [
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
]


@pytest.mark.parametrize("hook", HOOKS)
def test_module_hooks_change_batches_as_without_the_cut(hook: str) -> None:
    module, whole, untouched = Changed(), Changed(cut=None), Split(cut=None)
    for each in (module, whole):
        each.hook = hook
        fit(each)
    fit(untouched)
    assert deviation(module, whole, START) <= TOLERANCE[torch.float64]
    assert deviation(untouched, whole, START) > 0.01


class Data(pl.LightningDataModule):
    """The same, in the data module, whose hooks then take the module's place."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.hook = hook

    def train_dataloader(self) -> Any:
        return loader_batches()

    changed = Changed.changed
    on_before_batch_transfer = Changed.on_before_batch_transfer
    on_after_batch_transfer = Changed.on_after_batch_transfer

    def transfer_batch_to_device(
        self, batch: Any, device: Any, dataloader_idx: int
    ) -> Any:
        moved = {k: v.to(device) for k, v in batch.items()}
        return self.changed(moved) if self.hook.startswith("transfer") else moved  # type: ignore[arg-type]


@pytest.mark.parametrize("hook", HOOKS)
def test_data_module_hooks_change_batches_as_without_the_cut(hook: str) -> None:
    made = Split(), Split(cut=None)
    for each in made:
        trainer(1).fit(each, datamodule=Data(hook))
    reference = Changed(cut=None)
    fit(reference)
    for each in made:
        assert deviation(each, reference, START) <= TOLERANCE[torch.float64]


class Masking(Changed):
    """Makes another selection of labels on the device, as masked models do."""

    def changed(self, batch: Any) -> Any:
        labels = batch["labels"].clone()
        labels[:, ::2] = -100
        return {**batch, "labels": labels}


@pytest.mark.parametrize("hook", HOOKS[1:])
def test_labels_that_change_on_the_way_are_refused(hook: str) -> None:
    """They were weighed on the host: the division would be wrong in silence."""
    module = Masking()
    module.hook = hook
    text = r"weighed 72 before it went to the device, and weighs 35 after transfer"
    refused(module, text)
    module = Masking()
    module.hook = HOOKS[0]
    whole = Masking(cut=None)
    whole.hook = HOOKS[0]
    fit(module)
    fit(whole)
    assert deviation(module, whole, START) <= TOLERANCE[torch.float64]


class Labelling(Changed):
    """Makes its labels on the device."""

    def changed(self, batch: Any) -> Any:
        return {"ids": batch["ids"], "labels": batch["targets"]}

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {"ids": batch["ids"], "targets": batch["labels"]}


def test_labels_that_are_made_on_the_way_are_refused() -> None:
    refused(Labelling(), "path 'labels'.*targets")


class WithoutIndex(Split):
    def training_step(self, batch: Any) -> Any:  # type: ignore[override]
        return plain_token_loss(self.net, batch)


def test_training_step_without_an_index_is_cut() -> None:
    module, whole = WithoutIndex(), Split(cut=None)
    fit(module)
    fit(whole)
    assert deviation(module, whole, START) <= TOLERANCE[torch.float64]


def test_a_list_of_samples_is_collated_by_micro_batch() -> None:
    module = Split(cut=MicroBatching(size=4, collate=pad_and_mask))
    lists = DataLoader(SEQUENCES, batch_size=16, collate_fn=list)  # type: ignore[arg-type]
    trainer(1).fit(module, lists)
    whole = Split(cut=None)
    batches = DataLoader(SEQUENCES, batch_size=16, collate_fn=pad_and_mask)  # type: ignore[arg-type]
    trainer(1).fit(whole, batches)
    assert deviation(module, whole, START) <= TOLERANCE[torch.float64]


def test_several_loaders_are_cut_together() -> None:
    """A dict of loaders yields a dict of batches: one window, of several terms, say."""

    class Two(Split):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return plain_token_loss(self.net, batch["a"])

    made = (
        Two(strategy=PerToken(labels="a.labels")),
        Two(strategy=PerToken(labels="a.labels"), cut=None),
    )
    for each in made:
        loaders = {"a": loader_batches((8, 7, 9)), "b": loader_batches((8, 7, 9))}
        trainer(1).fit(each, loaders)
    assert deviation(*made, START) <= TOLERANCE[torch.float64]
    assert weights(made[0]).isfinite().all()


def test_nothing_is_said_where_nothing_is_wrong() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*treespec", FutureWarning)
        warnings.filterwarnings("ignore", "The '\\w+_dataloader' does not have many")
        fit(Split(cut=FIXED))
