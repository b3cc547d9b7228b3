"""What a split window cannot be is refused by name, and errors say where they arose."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from tests.lit.split.common import (
    AUTO,
    FIXED,
    TRANSFER_HOOKS,
    Split,
    data_module,
    failing,
    fit,
    on_the_way,
    samples,
)
from tests.zoo.modules import Manual, hooked, pad_and_mask
from trainkit import (
    AccumulationStrategy,
    MicroBatching,
    TrainkitError,
    Uniform,
)

pytestmark = pytest.mark.filterwarnings("ignore:accumulation. an open window")


@dataclass(frozen=True)
class Longest(AccumulationStrategy):
    """No sum over rows."""

    def weight(self, batch: Any) -> Tensor:
        return (batch["labels"] != -100).sum(1).max()


def adding(value: Any) -> Any:
    """The batch has one more field."""

    def on_train_batch_start(self: Any, batch: Any, batch_idx: int) -> None:
        batch["other"] = value

    return hooked(Split, on_train_batch_start=on_train_batch_start)()


def returning(output: Any) -> Any:
    """`training_step` returns this, or what a function makes of the batch."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        return output(self, batch) if callable(output) else output

    return hooked(Split, training_step=training_step)()


def none_for_long_rows(module: Any, batch: Any) -> Any:
    is_long = batch["attention_mask"].sum(1).max() > 12
    return None if is_long else module.loss_of(batch)


A_TENSOR = "must be a tensor with one"
WRONG_TYPES: list[Any] = [4, {"size": 4}, "auto"]
REFUSED: list[tuple[Callable[[], Any], str]] = [
    *[
        (lambda o=options: Split(cut=o), "must be a MicroBatching, received .*size=4")
        for options in WRONG_TYPES
    ],
    (lambda: Manual(cut=FIXED), "with automatic_optimization=False Manual runs its"),
    (
        lambda: Split(strategy=Longest()),
        "Longest: what micro-batches weigh must add up .* Let weight.. return a sum",
    ),
    (
        lambda: adding(torch.zeros(14).to_sparse()),
        "field 'other' is a torch.sparse_coo tensor, whose rows cannot be",
    ),
    (lambda: returning(none_for_long_rows), "it returned None for [1-9] micro-batches"),
    (
        lambda: returning({"logits": 1}),
        r"must hold the loss under 'loss', received \{'logits': 'int'",
    ),
    (lambda: returning({"loss": None}), r"received \{'loss': 'NoneType'\}"),
    (lambda: returning(torch.ones(3)), rf"{A_TENSOR} element, received \[3\]"),
    (lambda: returning(1.0), f"{A_TENSOR} element, received 1.0"),
    (lambda: returning({"loss": 2}), f"{A_TENSOR} element, received 2"),
]


@pytest.mark.parametrize(("make", "text"), REFUSED)
def test_what_cannot_be_cut_is_refused(make: Callable[[], Any], text: str) -> None:
    module = make()
    with pytest.raises(TrainkitError, match=text):
        fit(module)
    assert "log" not in vars(module)


def test_uniform_is_announced_and_depends_on_the_cut() -> None:
    """For comparison with the big batch, which it is not."""
    found = []
    for cut in (FIXED, AUTO):
        with pytest.warns(UserWarning, match="micro_batching: Uniform.. weighs micro-"):
            fitted = fit(Split(strategy=Uniform(), cut=cut))
        found.append(fitted.lightning_module.net.head.weight)  # type: ignore[union-attr]
    assert not torch.allclose(*found)


def test_what_every_micro_batch_gets_whole_is_said_once(capsys: Any) -> None:
    fit(adding(torch.zeros(3)))
    said = "trainkit | split: every micro-batch gets all of 'other'"
    assert capsys.readouterr().out.count(said) == 1


def test_nothing_is_said_where_nothing_is_wrong() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*treespec", FutureWarning)
        warnings.filterwarnings("ignore", "The '\\w+_dataloader' does not have many")
        fit(Split())


# ---- self.log, and StopIteration, on the way to the device ---------------------------


CUTS = [FIXED, AUTO]


def logging_on_the_way(module: Any, batch: Any) -> Any:
    if isinstance(module, pl.LightningDataModule):
        assert module.trainer is not None
        module = module.trainer.lightning_module
    module.log("mine", 1.0)
    return batch


@pytest.mark.parametrize(
    ("hook", "cut"),
    [*zip(TRANSFER_HOOKS, cycle(CUTS)), (TRANSFER_HOOKS[0], None)],
)
def test_logs_on_the_way_are_refused_as_lightning_does(hook: str, cut: Any) -> None:
    kind = hooked(Split, **on_the_way(hook, logging_on_the_way))
    text = rf"^You can't `self.log\(\)` inside `{hook}`"
    with pytest.raises(MisconfigurationException, match=text):
        fit(kind(cut=cut))


def test_logs_of_a_data_module_are_refused_as_lightning_does() -> None:
    hooks = on_the_way(TRANSFER_HOOKS[2], logging_on_the_way)
    said = []
    for cut in (FIXED, None):
        with pytest.raises(RuntimeError, match="batch_to_device") as raised:
            fit(Split(cut=cut), data=data_module(hooks))
        said.append(str(raised.value))
    assert said[0] == said[1]


class Slotted(Exception):
    """Takes no notes, as on Python 3.10."""

    add_note = property()  # type: ignore[assignment]


NOTED = (
    r"micro-batch 2 of 4, 4 of the 1[46] rows of a loader batch: dict\(ids: int64\[4,"
    r".*shared=.*trim=False"
)


@pytest.mark.parametrize(
    ("cut", "error", "note"),
    [
        (FIXED, None, NOTED),
        (MicroBatching(size=4, collate=pad_and_mask), None, NOTED),
        (MicroBatching(size=100), None, "^$"),
        (FIXED, Slotted("mine"), "^$"),
    ],
)
@pytest.mark.skipif(sys.version_info < (3, 11), reason="no notes")
def test_an_error_says_how_its_batch_was_cut(
    cut: MicroBatching, error: Exception | None, note: str
) -> None:
    """But where nothing was cut."""
    data = samples() if cut.collate else None
    with pytest.raises(Exception, match="must match|mine") as raised:
        fit(failing(2, error)(cut=cut), data=data)
    assert error is None or raised.value is error
    assert re.search(note, "\n".join(getattr(raised.value, "__notes__", [])))
