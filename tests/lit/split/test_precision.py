"""Cut batches in every precision, and in models that behave differently each time."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.helpers import TOLERANCE, deviation, weights
from tests.lit.fronts import Plain, sample_loss, windows_of
from tests.lit.split.common import CUTS, FIXED, START, Split, fit
from tests.lit.windows.half import precise
from trainkit import PerSample, PerToken
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.errors import TrainkitError

SINGLE = weights(Plain(dtype=torch.float32))
SCALER = {"init_scale": 2.0**12}


def half(precision: str, cut: Any, **how: Any) -> Split:
    """Trained in a precision, from float32 weights."""
    module = Split(cut=cut, dtype=torch.float32, **how)
    scaler = SCALER if precision == "16-mixed" else {}
    fit(module, **precise(precision, **scaler))
    return module


@pytest.mark.parametrize(
    ("precision", "cut", "tolerance"),
    [  # every cut with a scaler, and every precision
        ("64-true", "size", 1e-6),
        ("bf16-mixed", "tokens", 2e-2),
        ("16-mixed", "size", 2e-3),
        ("16-mixed", "tokens", 2e-3),
        ("16-mixed", "auto", 2e-3),
        ("bf16-true", "auto", 0.1),
    ],
)
def test_precision_equals_whole_batches(
    precision: str, cut: str, tolerance: float
) -> None:
    ours, whole = half(precision, CUTS[cut]), uncut(precision)
    assert deviation(ours, whole, SINGLE) <= tolerance


@cache
def uncut(precision: str) -> Tensor:
    """The weights at the end."""
    return weights(half(precision, None))


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true"])
def test_sums_in_half_precision_equal_means(precision: str) -> None:
    """Losses that are sums over many tokens."""
    strategy = PerToken(loss_reduction="sum")
    ours = half(precision, FIXED, strategy=strategy, reduction="sum")
    assert deviation(ours, uncut("32-true"), SINGLE) <= 0.1


def test_a_scaler_that_skips_loses_no_more_steps_than_without_the_cut() -> None:
    """Its factor is too large at first: the same number of steps is skipped."""
    found = []
    for cut in (FIXED, None):
        module = Split(cut=cut, dtype=torch.float32)
        options = precise("16-mixed", init_scale=2.0**24)
        fitted = fit(module, max_epochs=6, **options)
        found.append(windows_of(fitted).num_skipped_steps)
    assert 0 < found[0] <= found[1]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not")
def test_compiled_module_equals_whole_batches() -> None:
    """What is logged too: `log` is not to be compiled."""

    class Logging(Split):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss, on_epoch=True)
            return loss

    module, whole = Logging(), Logging(cut=None)
    compiled: Any = torch.compile(module, backend="aot_eager", dynamic=True)
    sizes = (8, 6, 3)  # no micro-batch is a single row, which is compiled by itself
    ours, theirs = fit(compiled, sizes=sizes), fit(whole, sizes=sizes)
    assert deviation(module, whole, START) <= TOLERANCE[torch.float64]
    torch.testing.assert_close(
        ours.callback_metrics["loss"], theirs.callback_metrics["loss"]
    )


# ---- models --------------------------------------------------------------------------


class Checkpointed(Split):
    """Computes its activations again in the backward pass, with dropout."""

    def __init__(self, *, again: bool, p: float = 0.0, **how: Any) -> None:
        super().__init__(**how)
        self.again = again
        self.drop = nn.Dropout(p)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        def logits(ids: Tensor) -> Tensor:
            return self.drop(self.net(ids))

        ids = batch["ids"]
        if self.again:
            found: Any = checkpoint(logits, ids, use_reentrant=False)
        else:
            found = logits(ids)
        return nn.functional.cross_entropy(
            found.flatten(0, 1), batch["labels"].flatten()
        )


def test_gradient_checkpointing_equals_whole_batches() -> None:
    ours, whole = Checkpointed(again=True), Checkpointed(again=False, cut=None)
    fit(ours)
    fit(whole)
    assert deviation(ours, whole, START) <= TOLERANCE[torch.float64]


def test_gradient_checkpointing_replays_dropout_in_each_micro_batch() -> None:
    ends = []
    for again in (True, False):
        torch.manual_seed(3)
        module = Checkpointed(again=again, p=0.5)
        fit(module)
        ends.append(weights(module))
    torch.testing.assert_close(ends[0], ends[1])
    assert float((ends[0] - START).norm()) > 0.1


class Partly(Split):
    """Has a frozen part, and one that nothing uses."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.net.embed.requires_grad_(False)
        self.idle = nn.Linear(2, 2, dtype=torch.float64)


def test_frozen_and_unused_parameters_stay() -> None:
    ours, whole = Partly(optimizer="adamw"), Partly(optimizer="adamw", cut=None)
    idle = weights(ours.idle)
    fit(ours)
    fit(whole)
    assert deviation(ours.net, whole.net, START) <= TOLERANCE[torch.float64]
    assert torch.equal(weights(ours.idle), idle)
    assert torch.equal(weights(ours.net.embed), weights(Split().net.embed))


class Sometimes(Split):
    """Uses a part for long rows alone, so in some micro-batches not at all."""

    def __init__(self, **how: Any) -> None:
        super().__init__(sample_loss, strategy=PerSample(), **how)
        self.bias = nn.Parameter(torch.zeros(13, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        long = (batch["labels"] != -100).sum(1) > 15
        loss = super().training_step(batch, batch_idx)
        if long.any():
            loss = loss + (self.bias.exp().sum() * long.sum()) / len(long)
        return loss


def test_a_parameter_that_some_micro_batches_leave_out() -> None:
    ours, whole = Sometimes(), Sometimes(cut=None)
    fit(ours)
    fit(whole)
    assert float(whole.bias.detach().abs().max()) > 0
    torch.testing.assert_close(ours.bias, whole.bias)
    torch.testing.assert_close(weights(ours), weights(whole))


# ---- what weighs nothing, and what is not finite -------------------------------------


class Ignoring(Split):
    """Rows that begin with certain tokens have no labels."""

    tokens: tuple[int, ...] = ()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        labels = batch["labels"].clone()
        for token in self.tokens:
            labels[batch["ids"][:, 0] == token] = -100
        return {**batch, "labels": labels}


@pytest.mark.parametrize("window", [1, 2])
def test_micro_batches_without_labels_do_not_count(window: int) -> None:
    """Cross entropy's mean over no label is NaN there, and its gradient is zero."""
    ours, whole = Ignoring(cut=MicroBatching(size=1, trim=False)), Ignoring(cut=None)
    for each in (ours, whole):
        each.tokens = (2, 3, 5, 7)
        fit(each, window=window)
    assert deviation(ours, whole, START) <= TOLERANCE[torch.float64]


def test_a_window_without_labels_has_gradient_zero() -> None:
    module = Ignoring(optimizer="sgd")
    module.tokens = tuple(range(13))
    with pytest.warns(UserWarning, match="none of the window's 4 micro-batches weighs"):
        fitted = fit(module)
    assert torch.equal(weights(module), START)
    assert fitted.global_step == 6


class Broken(Split):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        is_broken = batch_idx == 1 and batch["ids"].shape[1] < 8
        return loss * float("nan") if is_broken else loss


@pytest.mark.filterwarnings("ignore:accumulation. an open window")
@pytest.mark.parametrize("checks", ["late", "now"])
def test_a_nan_loss_in_one_micro_batch_stops_the_run(checks: Any) -> None:
    module = Broken()
    module.checks = checks
    with pytest.raises(TrainkitError, match=r"step 1 .*the loss must be finite where"):
        fit(module)
    assert bool(weights(module).isfinite().all()) == (checks == "now")


def test_a_nan_loss_under_a_scaler_skips_the_step() -> None:
    module = Broken(dtype=torch.float32)
    fitted = fit(module, max_epochs=1, **precise("16-mixed", **SCALER))
    assert windows_of(fitted).num_skipped_steps == 1
    assert weights(module).isfinite().all()
