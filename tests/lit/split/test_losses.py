"""Losses of several terms, in every precision, and of what is not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor

from tests.helpers import deviation, weights
from tests.lit.fronts import windows_of
from tests.lit.split.common import (
    CUTS,
    FIXED,
    START,
    Split,
    Summing,
    assert_as_whole,
    both,
    fit,
    logging_loss,
    off,
    relabelled,
)
from tests.lit.windows.test_half_precision import precise
from tests.zoo.modules import Plain, Terms, hooked
from trainkit import MicroBatching, PerSample, PerToken, TrainkitError, Uniform

COEFFICIENTS = [(1.0, 3.0), (0.0, 1.0), (1.0, 0.0)]
ROWS = MicroBatching(size=1, trim=False)


class Cut(Terms):
    """Two terms, or their sum where nothing cuts."""

    def __init__(
        self, *, cut: MicroBatching | None = FIXED, strategy: Any = None, **how: Any
    ) -> None:
        if isinstance(strategy, Uniform):
            strategy = dict.fromkeys(("tokens", "samples"), strategy)
        if cut is None:
            self.is_whole, strategy = True, PerSample()
        super().__init__(cut=cut, strategy=strategy, **how)


OF_COEFFICIENTS = {each: hooked(Cut, coefficients=each) for each in COEFFICIENTS}
CASES = [
    ("auto", COEFFICIENTS[0], "adamw"),
    ("tokens", COEFFICIENTS[1], "momentum"),
    ("rows", COEFFICIENTS[2], "sgd"),
]


@pytest.mark.parametrize(("cut", "coefficients", "optimizer"), CASES, ids=str)
def test_terms_equal_uncut_loss(
    cut: str, coefficients: tuple[float, float], optimizer: str
) -> None:
    """Both, and term by term."""
    kind, made = OF_COEFFICIENTS[coefficients], {"optimizer": optimizer}
    assert_as_whole(kind, CUTS[cut], made=made, gradient_clip_val=1.0)


@pytest.mark.parametrize("strategy", [PerToken(), PerSample()], ids=str)
def test_one_strategy_for_both_differs(strategy: Any) -> None:
    """The control: their sum, cut."""
    alike = hooked(Terms, is_whole=True)(strategy=strategy, cut=FIXED)
    assert off(alike, Cut(cut=None)) > 1e-2


def test_terms_of_several_loader_batches_are_those_of_one() -> None:
    """Their totals are known, since they wait for each other."""
    fit(ours := Cut(), window=2, sizes=(9, 7, 8, 16))
    fit(whole := Cut(cut=None), sizes=(16, 24))
    assert deviation(ours, whole, START) <= 1e-10


def test_a_cut_that_is_the_whole_batch_is_a_window_like_any_other() -> None:
    assert_as_whole(Cut, MicroBatching(size=100))


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("is_named", [True, False])
def test_one_named_term_equals_one_strategy(is_named: bool, window: int) -> None:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.log("loss", loss := self.loss_of(batch))
        return {"loss": {"ce": loss}} if is_named else loss

    kind = hooked(Split, training_step=training_step)
    module, how = kind(strategy={"ce": PerToken()}), {"sizes": (9, 7, 5)}
    assert off(module, Split(cut=None), window=window, **how) <= 1e-10


def test_window_shows_the_whole_loss_in_the_first_terms_unit() -> None:
    seen: list[Tensor] = []
    keep = LambdaCallback(on_before_backward=lambda *args: seen.append(args[-1]))
    fitted = fit(Cut(), max_epochs=1, sizes=(30,))
    fit(Cut(cut=None), keep, max_epochs=1, sizes=(30,))
    window = windows_of(fitted).last_window
    assert window is not None
    torch.testing.assert_close(window.loss, seen[0].detach())


class Logged(Cut):
    """Logs a term itself, it detached, and what is computed from it."""

    def terms_of(self, batch: Any) -> dict[str, Tensor]:
        terms = super().terms_of(batch)
        each, both = terms["samples"], {"on_step": True, "on_epoch": True}
        self.log("tokens", terms["tokens"], **both)
        self.log("samples", each.detach(), **both)
        weight = PerSample() if self.is_whole else "samples"
        self.log("half", each / 2, weight=weight)  # type: ignore[call-arg]
        self.log("first", terms["tokens"] * 2)
        return terms

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("outputs", outputs["loss"])


@pytest.mark.parametrize("cut", ["size", "tokens"])
def test_a_logged_term_is_weighed_as_that_term(cut: str) -> None:
    assert_as_whole(Logged, CUTS[cut])


class Long(Cut):
    """Its rows have a length where they have no labels."""

    def terms_of(self, batch: Any) -> dict[str, Tensor]:
        valid = (batch["rows"] != -100).unsqueeze(-1)
        each = (self.net(batch["ids"]).square() * valid).sum((1, 2)).mean() / 10
        ce = self.loss_of(batch)
        return {"tokens": ce.nan_to_num() if self.is_whole else ce, "samples": each}


def test_a_term_may_weigh_nothing_in_a_window() -> None:
    """That is said, since the window is measured by it."""
    text = "weighs anything in the term 'tokens' .*This gradient is zero"
    with pytest.warns(UserWarning, match=text):
        ours, whole = both(relabelled(Long, *range(13)), ROWS, sizes=(14, 9))
    assert deviation(ours.lightning_module, whole.lightning_module, START) <= 1e-10


# ---- what is refused -----------------------------------------------------------------

TWO, ONE = r"\['samples', 'tokens'\]", r"one tensor, as there is one strategy, PerToken"
NOT_THERE = rf"{TWO} have denominators .* must be cut.* MicroBatching\(size=4"
CHANGES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda t: {"loss": {"tokens": t["tokens"]}}, r"received \['tokens'\]"),
    (lambda t: t, r"must hold the loss under 'loss', received \{'tokens': 'Tensor', "),
]


def returning(change: Callable[[Any], Any]) -> Any:
    """Two terms, returned in another way."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        return change(self.terms_of(batch))

    return hooked(Cut, training_step=training_step)()


@pytest.mark.filterwarnings("ignore:accumulation. an open window")
@pytest.mark.parametrize(
    ("make", "window", "text"),
    [
        *[(lambda c=change: returning(c), 1, text) for change, text in CHANGES],
        (lambda: Cut(strategy=PerToken()), 1, ONE),
        (lambda: Cut(strategy=PerToken()), 2, ONE),
        (lambda: Terms(), 1, NOT_THERE),
    ],
)
def test_wrong_terms_are_refused(make: Any, window: int, text: str) -> None:
    """Also several loader batches in a window, and streamed windows."""
    with pytest.raises(TrainkitError, match=text):
        fit(make(), window=window)


LOGGING = hooked(Split, training_step=logging_loss(on_epoch=True))
FLOAT: Any = {"dtype": torch.float32}


@pytest.mark.parametrize(
    ("kind", "precision", "cut", "expected", "tolerance"),
    [
        (Split, "64-true", "size", "64-true", 1e-6),
        (Split, "bf16-mixed", "tokens", "bf16-mixed", 2e-2),
        (Split, "16-mixed", "auto", "16-mixed", 2e-3),
        (Split, "bf16-true", "auto", "bf16-true", 0.1),
        (Summing, "16-mixed", "size", "32-true", 0.1),
        (Cut, "32-true", "size", "32-true", 2e-5),
        (Cut, "16-mixed", "size", "32-true", 1e-2),
    ],
)
def test_precision_equals_whole_batches(
    kind: Any, precision: str, cut: str, expected: str, tolerance: float
) -> None:
    """Sums over many tokens equal float32's means, and terms their sum."""
    fit(ours := kind(cut=CUTS[cut], **FLOAT), **precise(precision))
    kind = Split if kind is Summing else kind
    fit(whole := kind(cut=None, **FLOAT), **precise(expected))
    assert deviation(ours, whole, weights(Plain(**FLOAT))) <= tolerance


def test_a_scaler_that_skips_loses_no_more_steps_than_without_the_cut() -> None:
    """Its factor is too large at first: the same number of steps is skipped."""
    found = []
    for cut in (FIXED, None):
        module = Split(cut=cut, dtype=torch.float32)
        fitted = fit(module, max_epochs=6, **precise("16-mixed", init_scale=2.0**24))
        found.append(windows_of(fitted).num_skipped_steps)
    assert 0 < found[0] <= found[1]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not")
@pytest.mark.parametrize(("kind", "backend"), [(LOGGING, "aot_eager"), (Cut, "eager")])
def test_compiled_module_equals_whole_batches(kind: Any, backend: str) -> None:
    """One loss or several terms. What is logged too: `log` is not to be compiled."""
    module, whole = kind(), kind(cut=None)
    compiled: Any = torch.compile(module, backend=backend, dynamic=True)
    # No micro-batch is a single row, which is compiled by itself.
    how: Any = {"sizes": (8, 6, 3), "max_epochs": 1}
    ours, theirs = fit(compiled, **how), fit(whole, **how)
    assert deviation(module, whole, START) <= 1e-10
    torch.testing.assert_close(ours.callback_metrics, theirs.callback_metrics)


# ---- what weighs nothing, and what is not finite -------------------------------------


def test_a_window_without_labels_has_gradient_zero() -> None:
    module = relabelled(Split, *range(13))()
    with pytest.warns(UserWarning, match="none of the window's 4 micro-batches weighs"):
        fitted = fit(module)
    assert torch.equal(weights(module), START)
    assert fitted.global_step == 6


class Broken(Split):
    """Its loss is NaN in one micro-batch of the second loader batch."""

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
    fitted = fit(module, max_epochs=1, **precise("16-mixed"))
    assert windows_of(fitted).num_skipped_steps == 1
    assert weights(module).isfinite().all()
