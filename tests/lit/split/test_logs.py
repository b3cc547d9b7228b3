"""What `training_step` logs is the same with the cut and without it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import trainer
from tests.lit.fronts import plain_token_loss, sample_loss
from tests.lit.split.common import (
    CUTS,
    Split,
    assert_same_logs,
    loader_batches,
    logged,
)
from trainkit import PerSample, PerToken
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.errors import TrainkitError

MEAN, SUM, MAX, MIN = "mean", "sum", "max", "min"


def lengths(batch: Any) -> Tensor:
    return (batch["labels"] != -100).sum(1).double()


class Logging(Split):
    """Logs in every way; tells the whole batch's loss by tokens."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        long = lengths(batch)
        self.log("default", loss)
        self.log("both", loss, on_step=True, on_epoch=True)
        self.log("epoch", loss, on_step=False, on_epoch=True)
        self.log("bar", loss, True)
        self.log("positional", loss, False, True, True, True)
        self.log("sum", long.sum(), on_epoch=True, reduce_fx=SUM)
        self.log("torch_sum", long.sum(), on_epoch=True, reduce_fx=torch.sum)
        self.log("longest", long.max(), on_epoch=True, reduce_fx=MAX)
        self.log("shortest", long.min(), on_epoch=True, reduce_fx=MIN)
        self.log("longest_torch", long.max(), on_epoch=True, reduce_fx=torch.max)
        self.log("number", len(long), on_epoch=True, reduce_fx=SUM)
        self.log("constant", 0.25, on_epoch=True)
        self.log("lr", self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]
        self.log("size", loss, on_epoch=True, batch_size=len(long))
        self.log("int", (batch["labels"] != -100).sum(), reduce_fx=SUM)
        self.log_dict({"d/loss": loss, "d/half": loss / 2}, on_epoch=True)
        return loss


def uncut(cls: type[Split], **how: Any) -> Split:
    return cls(cut=None, **how)


@cache
def logged_uncut() -> Any:
    return logged(uncut(Logging))


@pytest.mark.filterwarnings("ignore:You called `self.log:UserWarning")
@pytest.mark.parametrize("cut", ["size", "tokens", "rows", "auto"])
def test_logged_values_equal_those_of_the_whole_batch(cut: str) -> None:
    rows, metrics = logged(Logging(cut=CUTS[cut]))
    assert_same_logs((rows, metrics), logged_uncut())
    assert {"both_step", "both_epoch", "d/half_epoch", "sum_epoch"} < metrics.keys()
    assert len(rows) == 2 * (3 + 1)


@pytest.mark.filterwarnings("ignore:You called `self.log:UserWarning")
def test_logged_values_equal_with_several_loader_batches_in_a_window() -> None:
    ours = logged(Logging(), window=2, sizes=(6, 8, 9))
    assert_same_logs(ours, logged(uncut(Logging), window=2, sizes=(6, 8, 9)))


def test_values_logged_by_the_micro_batch_differ() -> None:
    """Negative control: a mean that is weighed otherwise."""
    ours, whole = (
        logged(Unweighted(cut=cut))[1]["loss"] for cut in (MicroBatching(size=4), None)
    )
    assert abs(ours - whole) > 1e-3


class Unweighted(Split):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, weight=1.0)
        return loss


class Weighing(Split):
    """Logs means over something else than the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        each = sample_loss(self.net, batch)
        weight = {"number": len(batch["ids"]), "strategy": PerSample()}[self.by]
        self.log("each", each, weight=weight, on_step=True, on_epoch=True)
        self.log_dict({"loss": loss}, on_epoch=True)
        return loss

    by = "number"


class WeighingByStrategy(Weighing):
    by = "strategy"


@pytest.mark.parametrize("made", [Weighing, WeighingByStrategy])
def test_weight_says_what_a_mean_is_over(made: type[Split]) -> None:
    assert_same_logs(logged(made()), logged(uncut(made)))


class WeighingByTerm(Split):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, weight="kl")
        return loss


def test_weight_of_an_unknown_term_is_refused() -> None:
    with pytest.raises(TrainkitError, match=r"no such term; the terms of .* are: none"):
        logged(WeighingByTerm())


class Sometimes(Split):
    """Logs in some micro-batches only: those with long rows."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        long = lengths(batch)
        if long.max() > 12:
            self.log("longest", long.max(), on_epoch=True, reduce_fx=MAX)
        return loss


def test_logged_in_some_micro_batches_only() -> None:
    assert_same_logs(logged(Sometimes()), logged(uncut(Sometimes)))


class InOtherHooks(Split):
    """Logs from hooks that run for each micro-batch, and from some that do not."""

    def on_before_backward(self, loss: Tensor) -> None:
        self.log("before_backward", loss, on_step=True, on_epoch=True)
        self.log("constant", 0.5, on_epoch=True, weight=PerSample())

    def on_after_backward(self) -> None:
        self.log("after_backward", 1.0)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = torch.cat([p.grad.flatten() for p in self.parameters()]).norm()  # type: ignore[union-attr]
        self.log("norm", norm, on_step=True, on_epoch=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("end", outputs["loss"])
        self.log("rows", float(len(batch["ids"])))


def test_logs_from_other_hooks_equal_those_of_the_whole_batch() -> None:
    assert_same_logs(logged(InOtherHooks()), logged(uncut(InOtherHooks)))


class Exact(Split):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log_exact("exact", loss, batch)
        self.log_exact("exact_sum", loss * 2, weight=self.accumulation.weight(batch))  # type: ignore[union-attr]
        return loss


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_log_exact_equals_that_of_the_whole_batch(reduction: Any) -> None:
    strategy = PerToken(loss_reduction=reduction)
    ours, whole = (
        logged(Exact(cut=cut, strategy=strategy, reduction=reduction))
        for cut in (MicroBatching(size=3), None)
    )
    assert_same_logs(ours, whole)
    assert {"exact", "exact_sum"} <= whole[1].keys()


class Empty(Split):
    """One of the rows has no labels, and it is alone in its micro-batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        labels = batch["labels"].clone()
        labels[labels[:, 0] == 7] = -100
        counting = (labels != -100).sum()
        loss = plain_token_loss(self.net, {**batch, "labels": labels})
        self.log("loss", loss, weight=counting)
        return loss.nan_to_num()


def test_a_nan_that_weighs_nothing_is_not_logged() -> None:
    """A mean over nothing is NaN, and NaN * 0 is NaN."""
    cut, whole = (
        logged(Empty(cut=c), max_epochs=1, sizes=(30,))[0][0]["loss"]
        for c in (MicroBatching(size=1), None)
    )
    assert cut == pytest.approx(whole)


class Validated(Split):
    """Logs in validation too, which comes between two windows."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = plain_token_loss(self.net, batch)
        self.log("val", loss)
        self.log_exact("val_exact", loss, batch)


def test_validation_between_windows_logs_as_ever() -> None:
    found = []
    for cut in (MicroBatching(size=3), None):
        fitted = trainer(1, val_check_interval=2)
        fitted.fit(Validated(cut=cut), loader_batches(), loader_batches((4, 4)))
        found.append({k: float(v) for k, v in fitted.callback_metrics.items()})
    assert found[0] == pytest.approx(found[1])
    assert "val_exact" in found[1]


class Odd(Split):
    """Logs something that Lightning does not take."""

    value: Any = torch.ones(3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("odd", self.value)
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:accumulation. an open window")
@pytest.mark.parametrize("value", [torch.ones(3), "text", {"a": {"b": 1}}, None])
def test_what_lightning_does_not_log_is_refused_alike(value: Any) -> None:
    """The same error, cut or whole."""
    texts = []
    for cut in (MicroBatching(size=4), None):
        module = Odd(cut=cut)
        module.value = value
        with pytest.raises(Exception, match="odd") as error:
            logged(module)
        texts.append((type(error.value), str(error.value)))
    assert texts[0] == texts[1]


def test_a_tensor_of_one_element_is_logged() -> None:
    found = []
    for cut in (MicroBatching(size=4), None):
        module = Odd(cut=cut)
        module.value = torch.ones(1, 1)
        found.append(logged(module))
    assert_same_logs(*found)


class Twice(Split):
    """Logs under one name twice, as in a loop over layers."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        for factor in (1.0, 3.0):
            self.log("loss", factor * loss, on_step=True, on_epoch=True)
        return loss


def test_a_name_that_is_logged_twice_shows_the_last_and_averages_both() -> None:
    assert_same_logs(logged(Twice()), logged(uncut(Twice)))


class Renaming(Split):
    """Has a `log` of its own, which goes on to Lightning's."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_epoch=True)
        return loss

    def log(self, name: str, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        super().log(f"mine/{name}", *args, **kwargs)


def test_a_log_of_the_modules_own_is_called_once_a_window() -> None:
    whole = logged(uncut(Renaming))
    assert_same_logs(logged(Renaming()), whole)
    assert "mine/loss_step" in whole[1]


class Changing(Split):
    """Writes over what it has logged."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        shown = loss.detach().clone()
        self.log("shown", shown)
        shown *= 0
        return loss


def test_what_is_written_over_after_it_was_logged_stays() -> None:
    assert_same_logs(logged(Changing()), logged(uncut(Changing)))


@pytest.mark.parametrize("detached", [True, False])
def test_a_logged_loss_that_is_a_sum_equals_that_of_the_whole_batch(
    detached: bool,
) -> None:
    class Summing(Split):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss.detach() if detached else loss, on_epoch=True)
            return {"loss": loss}

    found = [
        logged(
            Summing(cut=cut, reduction="sum", strategy=PerToken(loss_reduction="sum"))
        )
        for cut in (MicroBatching(size=4), None)
    ]
    assert_same_logs(*found)
