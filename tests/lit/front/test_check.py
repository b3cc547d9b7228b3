"""What `check` is given: data of any kind, and what the module or a callback says."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule

import trainkit
from tests.lit.proof.starting import plain_trainer
from tests.lit.proof.test_check import SPLIT, check_quickly
from tests.zoo import causes
from tests.zoo.causes import Images, Tokens, image_loader, token_loader
from tests.zoo.modules import hooked
from trainkit import MicroBatching, PerSample, PerToken


def fails(module: Any, logits: torch.Tensor, batch: Any) -> Any:
    raise KeyError("a user's mistake")


def test_an_error_of_the_step_is_raised_as_it_is() -> None:
    with pytest.raises(KeyError, match="a user's mistake"):
        check_quickly(Tokens(fails), token_loader(), strategy=PerToken())


class Unending:
    """Has no length."""

    def __iter__(self) -> Any:
        return itertools.cycle(image_loader())


class OfMany(Unending):
    """A class of one's own around loaders."""

    loaders = ()

    def __len__(self) -> int:
        return 4


class Indexed:
    """Gives batches by their number, as a sequence of Keras does."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return [*image_loader()][index]


@pytest.mark.parametrize(
    ("data", "num_rows"),
    [
        (lambda: next(iter(image_loader())), 4),
        (hooked(LightningDataModule, train_dataloader=lambda _: image_loader()), 10),
        (Unending, 4),
        (OfMany, 4),
        (Indexed, 4),
    ],
)
def test_data_are_a_batch_or_what_yields_batches(data: Any, num_rows: int) -> None:
    module = Images(causes.classified)
    report = check_quickly(module, data(), strategy=PerSample())
    assert report.exact
    assert report.num_rows == num_rows


class DrawsBefore(Tokens):
    """Draws when no micro-batch is under way."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.noise = torch.rand(len(batch["ids"]))


@pytest.mark.parametrize("micro_batches", [None, SPLIT])
def test_what_a_hook_draws_before_a_micro_batch_is_no_harm(micro_batches: Any) -> None:
    how: dict[str, Any] = {"strategy": PerToken(), "micro_batches": micro_batches}
    assert check_quickly(DrawsBefore(), token_loader(), **how).exact


class Unread(Tokens):
    """Without the mixin nothing reads these."""

    accumulation, micro_batching = PerSample(), SPLIT


class Read(trainkit.AccumulationMixin, Tokens):
    accumulation, micro_batching = PerToken(), SPLIT


def by_callback(*args: Any, **how: Any) -> Any:
    return {"trainer": plain_trainer([trainkit.AccumulationCallback(*args, **how)])}


INNER = MicroBatching(size=2, inside="head")


@pytest.mark.parametrize(
    ("module", "how", "name"),
    [
        (Read, {}, "split, weighed by PerToken()"),
        (Read, {"strategy": PerSample()}, "split, weighed by PerSample()"),
        (Read, {"micro_batches": INNER}, "inner cut"),
        (Unread, {}, "plain accumulation"),
        (Unread, by_callback(PerToken()), "weighed by PerToken()"),
        (
            Unread,
            by_callback(PerToken(), micro_batching=SPLIT),
            "split, weighed by PerToken()",
        ),
        (Unread, by_callback(micro_batching=INNER), "inner cut"),
    ],
)
def test_what_is_not_given_is_that_of_the_module_or_its_callback(
    module: Any, how: Any, name: str
) -> None:
    assert check_quickly(module(), token_loader(), **how).cuts[0].name == name
