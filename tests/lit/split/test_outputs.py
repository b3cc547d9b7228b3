"""What callbacks are given is that of the whole loader batch."""

from __future__ import annotations

from collections import OrderedDict
from functools import cache
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from tests.lit.fronts import sample_loss
from tests.lit.split.common import CUTS, SEQUENCES, SIZES, Split, fit
from trainkit import PerSample
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.errors import TrainkitError
from trainkit.lit.split.outputs import put_together, taken_apart


class Pair(NamedTuple):
    first: Any
    second: Any


class Seeing(pl.Callback):
    """Keeps the batches and outputs of all hooks that get them."""

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self.ended: list[Any] = []
        self.outputs: list[Any] = []

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.begun.append(batch)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.ended.append(batch)
        self.outputs.append(outputs)


def seen(module: Split, **options: Any) -> Seeing:
    callback = Seeing()
    fit(module, callback, max_epochs=1, **options)
    return callback


@cache
def seen_uncut(made: type[Split]) -> Seeing:
    return seen(made(cut=None))


class Returning(Split):
    """Returns all sorts of things beside the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        logits = self.net(batch["ids"])
        labels = batch["labels"]
        return {
            "loss": loss,
            "lengths": (labels != -100).sum(1),
            "first": logits[:, 0],
            "names": [str(row[0].item()) for row in batch["ids"]],
            "mean": loss * 2,
        }


@pytest.mark.parametrize("cut", ["size", "tokens", "rows", "auto"])
def test_outputs_equal_those_of_the_whole_batch(cut: str) -> None:
    ours, whole = seen(Returning(cut=CUTS[cut])), seen_uncut(Returning)
    for mine, theirs in zip(ours.outputs, whole.outputs, strict=True):
        assert mine.keys() == theirs.keys()
        torch.testing.assert_close(mine["loss"], theirs["loss"])
        assert torch.equal(mine["lengths"], theirs["lengths"])
        torch.testing.assert_close(mine["first"], theirs["first"])
        torch.testing.assert_close(mine["mean"], theirs["mean"])
        assert mine["names"] == theirs["names"]
        assert not any(v.requires_grad for v in mine.values() if isinstance(v, Tensor))


def test_callbacks_get_the_whole_loader_batch() -> None:
    ours = seen(Split())
    for batches in (ours.begun, ours.ended):
        assert [len(batch["ids"]) for batch in batches] == list(SIZES)
        assert sum(int((b["labels"] != -100).sum()) for b in batches) == sum(
            len(x) for x, _ in SEQUENCES
        )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_of_the_outputs_is_that_of_the_window(reduction: Any) -> None:
    strategy = PerSample(loss_reduction=reduction)
    ours, whole = (
        seen(Split(sample_loss, strategy=strategy, reduction=reduction, cut=cut))
        for cut in (MicroBatching(size=3), None)
    )
    for mine, theirs in zip(ours.outputs, whole.outputs, strict=True):
        torch.testing.assert_close(mine["loss"], theirs["loss"])


def test_what_has_no_rows_becomes_a_list() -> None:
    """In the order in which the micro-batches ran."""
    rows, weights = [[1, 2], [0]], [2, 1]
    extras = [{"k": "a", "n": torch.tensor(3)}, {"k": "b", "n": torch.tensor(5)}]
    found = put_together(extras, rows, weights)
    assert found == {"k": ["a", "b"], "n": [torch.tensor(3), torch.tensor(5)]}


def test_rows_of_different_widths_stay_apart() -> None:
    """Logits of micro-batches that were trimmed differently."""
    extras = [{"x": torch.ones(2, 5)}, {"x": torch.ones(1, 3)}]
    found = put_together(extras, [[1, 2], [0]], [2, 1])
    assert [tuple(x.shape) for x in found["x"]] == [(2, 5), (1, 3)]


def test_extras_of_some_micro_batches_only() -> None:
    extras = [{"x": torch.tensor(1.0)}, {}]
    found = put_together(extras, [[1, 2], [0]], [2, 1])
    assert found == {"x": [torch.tensor(1.0), None]}


class Nothing(Split):
    """Returns None for some micro-batches, or for all of some loader batches."""

    def __init__(self, when: Any, **how: Any) -> None:
        super().__init__(**how)
        self.when = when

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if self.when(batch, batch_idx) else loss


NONE = "ignore:`training_step` returned `None`:UserWarning"


@pytest.mark.filterwarnings(NONE)
@pytest.mark.parametrize("window", [1, 2])
def test_none_for_a_whole_loader_batch_equals_none_without_the_cut(
    window: int,
) -> None:
    """With several loader batches in a window, the others still count."""
    for skipped in ((1,), (0,), (2,), (1, 2)):
        made = [
            Nothing(lambda _, i, s=skipped: i in s, cut=cut, optimizer="momentum")
            for cut in (MicroBatching(size=4), None)
        ]
        steps = [
            fit(module, window=window, sizes=(9, 8, 12, 11)).global_step
            for module in made
        ]
        first, second = (list(module.parameters()) for module in made)
        assert steps[0] == steps[1]
        for mine, theirs in zip(first, second, strict=True):
            torch.testing.assert_close(mine, theirs)


@pytest.mark.filterwarnings("ignore:accumulation. an open window")
def test_none_for_some_micro_batches_is_refused() -> None:
    with pytest.raises(TrainkitError, match="it returned None for [1-9] micro-batches"):
        fit(Nothing(lambda batch, _: batch["attention_mask"].sum(1).max() > 12))


@pytest.mark.filterwarnings("ignore:accumulation. an open window")
@pytest.mark.parametrize(
    ("output", "text"),
    [
        ({"logits": 1}, r"must hold the loss under 'loss', received \{'logits': 'int'"),
        ({"loss": None}, r"received \{'loss': 'NoneType'\}"),
        (torch.ones(3), r"must be a tensor with one element, received \[3\]"),
        (1.0, "must be a tensor with one element, received 1.0"),
        ({"loss": 2}, "must be a tensor with one element, received 2"),
    ],
)
def test_wrong_outputs_are_refused(output: Any, text: str) -> None:
    class Wrong(Split):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return output

    with pytest.raises(TrainkitError, match=text):
        fit(Wrong())


def test_what_is_returned_beside_the_loss_holds_no_graph_however_it_is_nested() -> None:
    """Else the graphs of all micro-batches would be alive at the end of a window."""
    part = torch.ones(2, requires_grad=True) * 2
    nested = {"a": OrderedDict(b=part), "c": Pair(part, 1), "d": [(part,), "text"]}
    _, extras = taken_apart({"loss": part.sum(), **nested}, {"": PerSample()})
    assert extras is not None
    assert extras["a"]["b"].tolist() == extras["c"].first.tolist() == [2, 2]
    assert type(extras["a"]) is OrderedDict
    assert extras["c"].second == 1
    assert extras["d"][1] == "text"
    found = [extras["a"]["b"], extras["c"].first, extras["d"][0][0]]
    assert not any(each.requires_grad for each in found)
