"""What `training_step` logs and returns is that of the whole loader batch."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.helpers import deviation
from tests.lit.split.common import (
    CUTS,
    FIXED,
    START,
    Split,
    Summing,
    assert_as_whole,
    both,
    fit,
    loader_batches,
    logging_loss,
)
from tests.zoo.modules import hooked, plain_token_loss, sample_loss
from trainkit import MicroBatching, PerSample, TrainkitError

pytestmark = [
    pytest.mark.filterwarnings("ignore:You called `self.log:UserWarning"),
    pytest.mark.filterwarnings("ignore:accumulation. an open window"),
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning"),
]
BOTH: dict[str, Any] = {"on_step": True, "on_epoch": True}


def lengths(batch: Any) -> Tensor:
    return (batch["labels"] != -100).sum(1).double()


class Pair(NamedTuple):
    first: Any
    second: Any


class Telling(Split):
    """Logs in every way, from every hook, and returns all sorts of things."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        long = lengths(batch)
        self.log("default", loss)
        self.log("both", loss, on_step=True, on_epoch=True)
        self.log("epoch", loss, on_step=False, on_epoch=True)
        self.log("bar", loss, True)
        self.log("positional", loss, False, True, True, True)
        self.log("sum", long.sum(), on_epoch=True, reduce_fx="sum")
        self.log("torch_sum", long.sum(), on_epoch=True, reduce_fx=torch.sum)
        self.log("longest", long.max(), on_epoch=True, reduce_fx="max")
        self.log("shortest", long.min(), on_epoch=True, reduce_fx="min")
        self.log("longest_torch", long.max(), on_epoch=True, reduce_fx=torch.max)
        self.log("number", len(long), on_epoch=True, reduce_fx="sum")
        self.log("constant", 0.25, on_epoch=True)
        self.log("one_element", torch.full((1, 1), 0.5))
        self.log("lr", self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]
        self.log("size", loss, on_epoch=True, batch_size=len(long))
        self.log("int", long.long().sum(), reduce_fx="sum")
        self.log_dict({"d/loss": loss, "d/half": loss / 2}, on_epoch=True)
        if long.max() > 12:  # in some micro-batches only
            self.log("long", long.max(), on_epoch=True, reduce_fx="max")
        for factor in (1.0, 3.0):  # as in a loop over layers
            self.log("twice", factor * loss, **BOTH)
        each = sample_loss(self.net, batch)
        self.log("by_number", each, weight=len(long), **BOTH)
        self.log("by_strategy", each, weight=PerSample(), **BOTH)
        self.log_exact("exact", loss, batch)
        self.log_exact("exact_sum", loss * 2, weight=self.accumulation.weight(batch))  # type: ignore[union-attr]
        self.log("shown", shown := loss.detach().clone())
        shown *= 0  # it is written over after it was logged
        logits = self.net(batch["ids"])
        return {
            "loss": loss,
            "lengths": long,
            "first": logits[:, 0],
            "names": [str(row[0].item()) for row in batch["ids"]],
            "mean": loss * 2,
        }

    def on_before_backward(self, loss: Tensor) -> None:
        divided_by = self.trainer.accumulate_grad_batches  # by Lightning
        whole = loss if self.micro_batching is not None else loss * divided_by
        self.log("before_backward", whole, **BOTH)
        self.log("weighed", 0.5, on_epoch=True, weight=PerSample())  # type: ignore[call-arg]

    def on_after_backward(self) -> None:
        self.log("after_backward", 1.0)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = torch.cat([p.grad.flatten() for p in self.parameters()]).norm()  # type: ignore[union-attr]
        self.log("norm", norm, on_step=True, on_epoch=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("end", outputs["loss"])
        self.log("rows", float(len(batch["ids"])))


class SumsLogged(Summing):
    """Logs its loss, detached, and exactly."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_epoch=True)
        self.log("detached", loss.detach(), on_epoch=True)
        self.log_exact("exact", loss, batch)
        return {"loss": loss}


class Samples(Split):
    """Its loss is a mean over samples."""

    training_step = logging_loss()

    def __init__(self, **how: Any) -> None:
        super().__init__(sample_loss, **{"strategy": PerSample(), **how})


class Renaming(Split):
    """Has a `log` of its own, which goes on to Lightning's; it runs once a window."""

    training_step = logging_loss(on_epoch=True)

    def log(self, name: str, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        super().log(f"mine/{name}", *args, **kwargs)


class Late(Split):
    """Logs one name in a window's later micro-batches only, after another hook."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.may_log = self.micro_batching is None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", loss := super().training_step(batch, batch_idx), **BOTH)
        if self.may_log:
            self.log("late", 1.0)
        self.may_log = True
        return loss

    def on_after_backward(self) -> None:
        self.log("after_backward", 1.0)


class AddsUp(Split):
    """Adds its losses to the first one, in place."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss: Tensor = super().training_step(batch, batch_idx)
        if batch_idx == 0 and not hasattr(self, "total"):
            self.total = loss.detach()
        else:
            self.total += loss.detach()
        return loss


class LogsByItself(LambdaCallback):
    """Logs by the `log` that Lightning gives a callback, not by the module's."""

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self.log("by_callback", loss.detach(), **BOTH)  # type: ignore[attr-defined]


class Validated(Split):
    """Logs in validation too, which comes between two windows."""

    training_step = logging_loss(**BOTH)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", loss := self.loss_of(batch))
        self.log_exact("val_exact", loss, batch)


ONE = {"max_epochs": 1}
TWICE = {"val_check_interval": 2, "validation": loader_batches((4, 4))}


@pytest.mark.parametrize(
    ("kind", "cut", "names", "options"),
    [
        (Telling, "auto", {"both_step", "both_epoch", "d/half_epoch", "long"}, ONE),
        (Telling, "size", {"sum_epoch"}, {"window": 2, "sizes": (6, 8, 9)}),
        (SumsLogged, "size", {"exact"}, {}),
        (Samples, "size", {"loss"}, {}),
        (Renaming, "size", {"mine/loss_step"}, {}),
        (Late, "size", {"late", "loss_epoch"}, {}),
        (AddsUp, "size", set(), {}),
        (Split, "size", {"by_callback"}, {"callbacks": lambda: [LogsByItself()]}),
        (Validated, "size", {"val_exact"}, TWICE),
    ],
)
def test_logs_and_outputs_equal_those_of_the_whole_batch(
    kind: Any, cut: str, names: set[str], options: dict[str, Any]
) -> None:
    assert names <= assert_as_whole(kind, CUTS[cut], **options).callback_metrics.keys()


def test_values_logged_by_the_micro_batch_differ() -> None:
    """The control: a mean that is weighed otherwise."""
    kind = hooked(Split, training_step=logging_loss(weight=1.0))
    ours, whole = (each.callback_metrics["loss"] for each in both(kind))
    assert abs(ours - whole) > 1e-3


def test_weight_of_an_unknown_term_is_refused() -> None:
    kind = hooked(Split, training_step=logging_loss(weight="kl"))
    with pytest.raises(TrainkitError, match=r"no such term; the terms of .* are: none"):
        fit(kind())


class Empty(Split):
    """Some rows have no labels, and they are alone in their micro-batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        labels = batch["labels"].clone()
        labels[labels[:, 0] == 7] = -100
        loss = plain_token_loss(self.net, {**batch, "labels": labels})
        self.log("loss", loss, weight=(labels != -100).sum())  # type: ignore[call-arg]
        return loss.nan_to_num()


def test_a_nan_that_weighs_nothing_is_not_logged() -> None:
    """A mean over nothing is NaN, and NaN * 0 is NaN."""
    how: Any = {"max_epochs": 1, "sizes": (30,)}
    ours, whole = (each.callback_metrics for each in both(Empty, CUTS["rows"], **how))
    torch.testing.assert_close(ours, whole)


@pytest.mark.parametrize("value", [torch.ones(3), "text", {"a": {"b": 1}}, None])
def test_what_lightning_does_not_log_is_refused_alike(value: Any) -> None:
    """The same error, cut or whole."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.log("odd", value)

    texts = []
    for cut in (FIXED, None):
        with pytest.raises(Exception, match="odd") as error:
            fit(hooked(Split, training_step=training_step)(cut=cut))
        texts.append((type(error.value), str(error.value)))
    assert texts[0] == texts[1]


# ---- outputs that are not a whole batch's --------------------------------------------


class Odd(Split):
    """Returns what has no rows, rows of unlike widths, and what only some have."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, ids = super().training_step(batch, batch_idx), batch["ids"]
        rows, width = ids.shape
        part = loss * torch.ones(3)
        nested = {"a": OrderedDict(b=part), "c": Pair(part, 1), "d": [(part,), "text"]}
        some = {"some": loss * 1.0} if rows == 5 else {}
        names = {"text": f"{rows} rows", "number": torch.tensor(rows)}
        wide = {"wide": self.net(ids)[..., :1].expand(rows, width, 2)}
        return {"loss": loss, "nested": nested, **names, **wide, **some}


def test_what_has_no_rows_becomes_a_list() -> None:
    """In the order in which the micro-batches ran, the longest first; without graphs,
    however it is nested: else those of all micro-batches would be alive at the end."""
    outputs: list[Any] = []
    keep = LambdaCallback(on_train_batch_end=lambda *args: outputs.append(args[2]))
    fit(Odd(cut=MicroBatching(size=5)), keep, sizes=(14,), max_epochs=1)
    (output,) = outputs
    graphs = [getattr(leaf, "requires_grad", False) for leaf in tree_leaves(output)]
    assert not any(graphs)
    assert output["text"] == ["5 rows", "5 rows", "4 rows"]
    assert output["number"] == [torch.tensor(5), torch.tensor(5), torch.tensor(4)]
    shapes = [tuple(each.shape) for each in output["wide"]]
    assert [shape[0] for shape in shapes] == [5, 5, 4]
    assert shapes[0][1] > shapes[1][1] > shapes[2][1]
    assert output["some"][2] is None
    for each in output["nested"]:
        assert type(each["a"]) is OrderedDict
        assert (each["c"].second, each["d"][1]) == (1, "text")


@pytest.mark.parametrize(("skipped", "window"), [((1,), 1), ((2, 3), 2)])
def test_none_for_a_whole_window_equals_none_without_the_cut(
    skipped: tuple[int, ...], window: int
) -> None:
    """A training that skips none is another one, which is the control. Half of a window
    cannot be skipped: its total is known before."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx in skipped else self.loss_of(batch)

    kind = hooked(Split, training_step=training_step)
    how: Any = {"window": window, "sizes": (9, 8, 12, 11)}
    ours = assert_as_whole(kind, made={"optimizer": "momentum"}, naive=0, **how)
    with pytest.raises(
        TrainkitError, match="None for [23] micro-batches of a window and"
    ):
        fit(kind(cut=FIXED), window=3, sizes=(9, 8, 12))
    fit(control := Split(cut=None, optimizer="momentum"), **how)
    assert deviation(control, ours.lightning_module, START) > 1e-2
