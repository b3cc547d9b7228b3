"""Losses of several terms in split windows: each divided by its own total."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor

from tests.core.common import cross_entropy as ce_of
from tests.core.common import kl_of
from tests.helpers import NAIVE, TOLERANCE, deviation, weights
from tests.lit.fronts import Plain, windows_of
from tests.lit.split.common import (
    CUTS,
    START,
    Split,
    assert_same_logs,
    fit,
    logged,
)
from tests.lit.windows.half import precise
from trainkit import PerSample, PerToken
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.errors import TrainkitError

BOTH = {"ce": PerToken(), "kl": PerSample()}


class Terms(Split):
    """Cross entropy over tokens, and something over samples."""

    beta = 3.0
    alpha = 1.0

    def __init__(self, **how: Any) -> None:
        super().__init__(**dict(how, strategy=how.get("strategy", BOTH)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ce, kl = ce_of(self.net, batch), kl_of(self.net, batch)
        terms = {"ce": self.alpha * ce, "kl": self.beta * kl}
        self.log_terms(terms)
        return {"loss": terms}

    def log_terms(self, terms: dict[str, Tensor]) -> None:
        pass


class Whole(Plain):
    """The sum of both, of the uncut batch."""

    beta = Terms.beta
    alpha = Terms.alpha

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ce, kl = ce_of(self.net, batch), kl_of(self.net, batch)
        terms = {"ce": self.alpha * ce, "kl": self.beta * kl}
        self.log_terms(terms)
        return sum(terms.values())

    log_terms: Callable[..., None] = Terms.log_terms


COEFFICIENTS = [(1.0, 3.0), (0.0, 1.0), (1.0, 0.0)]


@cache
def uncut(optimizer: str, coefficients: tuple[float, float]) -> Tensor:
    """Where the whole batches end."""
    module = Whole(optimizer=optimizer)
    module.alpha, module.beta = coefficients
    fit(module, gradient_clip_val=1.0)
    return weights(module)


@pytest.mark.parametrize("coefficients", COEFFICIENTS, ids=str)
@pytest.mark.parametrize("cut", CUTS)
def test_terms_equal_uncut_loss(cut: str, coefficients: tuple[float, float]) -> None:
    """Both, and term by term; every optimizer sees every cut and all coefficients."""
    turn = COEFFICIENTS.index(coefficients) + list(CUTS).index(cut)
    optimizer = ["sgd", "momentum", "adamw"][turn % 3]
    module = Terms(optimizer=optimizer, cut=CUTS[cut])
    module.alpha, module.beta = coefficients
    fit(module, gradient_clip_val=1.0)
    expected = uncut(optimizer, coefficients)
    assert deviation(module, expected, START) <= TOLERANCE[torch.float64]


@pytest.mark.parametrize("strategy", [PerToken(), PerSample()], ids=str)
def test_one_strategy_for_both_differs(strategy: Any) -> None:
    """Negative control."""

    class Summed(Terms):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return sum(super().training_step(batch, batch_idx)["loss"].values())

    module, whole = Summed(strategy=strategy), Whole()
    fit(module)
    fit(whole)
    assert deviation(module, whole, START) > NAIVE


def test_float32_equals_uncut_loss() -> None:
    made = Terms(dtype=torch.float32), Whole(dtype=torch.float32)
    for each in made:
        fit(each)
    assert deviation(*made, START) <= 2e-5


@pytest.mark.filterwarnings("ignore:loss terms .*rounds the factor")
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_half_precision_is_near_uncut_loss(precision: str) -> None:
    made = Terms(dtype=torch.float32), Whole(dtype=torch.float32)
    scaler = {"init_scale": 2.0**10} if precision == "16-mixed" else {}
    for each in made:
        fit(each, **precise(precision, **scaler))
    reference = Whole(dtype=torch.float32)
    fit(reference)
    start = weights(Plain(dtype=torch.float32))
    tolerance = {"16-mixed": 1e-2, "bf16-mixed": 5e-2}[precision]
    assert deviation(made[0], reference, start) <= tolerance
    assert deviation(made[1], reference, start) <= tolerance


def test_compiled_module_equals_uncut_loss() -> None:
    module, whole = Terms(), Whole()
    compiled = torch.compile(module, backend="eager", dynamic=True)
    fit(compiled)  # type: ignore[arg-type]
    fit(whole)
    assert deviation(module, whole, START) <= TOLERANCE[torch.float64]


def test_window_shows_the_whole_loss_in_the_first_terms_unit() -> None:
    module, whole = Terms(), Whole()
    fitted = fit(module, max_epochs=1, sizes=(30,))
    window = windows_of(fitted).last_window
    seen: list[Tensor] = []
    whole.on_before_backward = seen.append  # type: ignore[method-assign]
    fit(whole, max_epochs=1, sizes=(30,))
    assert window is not None
    torch.testing.assert_close(window.loss, seen[0].detach())


# ---- what is logged ------------------------------------------------------------------


class Logged(Terms):
    def log_terms(self, terms: dict[str, Tensor]) -> None:
        self.log("ce", terms["ce"], on_step=True, on_epoch=True)
        self.log("kl", terms["kl"].detach(), on_step=True, on_epoch=True)
        self.log("half", terms["kl"] / 2, weight="kl")
        self.log("first", terms["ce"] * 2)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("outputs", outputs["loss"])


class WholeLogged(Whole, Split):
    """Split, so that it takes `weight=`, but not cut."""

    log_terms = Logged.log_terms
    on_train_batch_end = Logged.on_train_batch_end

    def __init__(self) -> None:
        Split.__init__(self, cut=None)


@pytest.mark.parametrize("cut", ["size", "tokens", "rows"])
def test_a_logged_term_is_weighed_as_that_term(cut: str) -> None:
    """The tensor itself, or detached; what is computed from it says `weight=`."""
    assert_same_logs(logged(Logged(cut=CUTS[cut])), logged_uncut())


@cache
def logged_uncut() -> Any:
    return logged(WholeLogged())


# ---- terms of weight 0 ---------------------------------------------------------------


class Labelled(Terms):
    """Rows that begin with a certain token have no labels."""

    without: tuple[int, ...] = ()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        labels = batch["labels"].clone()
        for token in self.without:
            labels[batch["ids"][:, 0] == token] = -100
        return {**batch, "rows": batch["labels"], "labels": labels}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        valid = (batch["rows"] != -100).unsqueeze(-1)
        kl = (self.net(batch["ids"]).square() * valid).sum((1, 2)).mean()
        return self.put(ce_of(self.net, batch), kl)

    def put(self, ce: Tensor, kl: Tensor) -> Any:
        return {"loss": {"ce": ce, "kl": kl / 10}}


class WholeLabelled(Labelled):
    def __init__(self, **how: Any) -> None:
        super().__init__(strategy=PerSample(), cut=None, **how)

    def put(self, ce: Tensor, kl: Tensor) -> Any:
        return ce.nan_to_num() + kl / 10


def fit_without(tokens: Any) -> float:
    ours, whole = Labelled(cut=MicroBatching(size=1, trim=False)), WholeLabelled()
    for each in (ours, whole):
        each.without = tuple(tokens)
        fit(each, sizes=(14, 9))
    return deviation(ours, whole, START)


def test_a_term_may_weigh_nothing_in_some_micro_batches() -> None:
    """Some rows have no label, and cross entropy is NaN there."""
    assert fit_without((3, 5)) <= TOLERANCE[torch.float64]


def test_a_term_may_weigh_nothing_in_a_window() -> None:
    """That is said, since the window is measured by it."""
    text = "weighs anything in the term 'ce' .*the step follows the other terms"
    with pytest.warns(UserWarning, match=text):
        assert fit_without(range(13)) <= TOLERANCE[torch.float64]


# ---- what is refused -----------------------------------------------------------------


class Other(Terms):
    """Returns something else."""

    change: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        terms = super().training_step(batch, batch_idx)["loss"]
        return self.change(terms)


@pytest.mark.filterwarnings("ignore:accumulation. an open window")
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: {"loss": {"ce": t["ce"]}}, r"its terms are \['ce'\], and there are"),
        (lambda t: {"loss": {**t, "l2": t["ce"]}}, r"\['ce', 'kl', 'l2'\], and there"),
        (lambda t: sum(t.values()), "ce.*kl"),
        (lambda t: {"loss": sum(t.values())}, "ce.*kl"),
        (lambda t: {"loss": {**t, "kl": 1.0}}, "'kl': must be a tensor with one"),
        (lambda t: t, r"must hold the loss under 'loss', received \{'ce': 'Tensor', "),
    ],
)
def test_wrong_terms_are_refused(change: Any, text: str) -> None:
    module = Other()
    module.change = change
    with pytest.raises(TrainkitError, match=text):
        fit(module)


@pytest.mark.filterwarnings("ignore:accumulation. an open window")
@pytest.mark.parametrize("window", [1, 2])
def test_terms_with_one_strategy_are_refused(window: int) -> None:
    with pytest.raises(TrainkitError, match="there is one strategy, PerToken, for one"):
        fit(Terms(strategy=PerToken()), window=window)


def test_one_named_term_equals_one_strategy() -> None:
    class One(Split):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("loss", loss := super().training_step(batch, batch_idx))
            return {"loss": {"ce": loss}} if self.named else loss

        named = True

    ends = []
    for named, window in ((True, 1), (False, 1), (True, 2), (False, 2)):
        module = One(strategy={"ce": PerToken()})
        module.named = named
        fit(module, window=window, sizes=(9, 7, 5))
        reference = Split()
        fit(reference, window=window, sizes=(9, 7, 5))
        ends.append(deviation(module, reference, START))
    assert max(ends) <= TOLERANCE[torch.float64]


def test_terms_of_several_loader_batches_are_refused() -> None:
    text = r"\['ce', 'kl'\] have denominators .* accumulate_grad_batches=2 .* Set it to"
    with pytest.raises(TrainkitError, match=text):
        fit(Terms(), window=2)


@pytest.mark.filterwarnings("ignore:accumulation. an open window")
def test_terms_under_a_schedule_of_windows_are_refused() -> None:
    """From its second epoch on, a window is two loader batches."""
    with pytest.raises(TrainkitError, match="accumulate_grad_batches=2 the window's"):
        fit(Terms(), GradientAccumulationScheduler({0: 1, 1: 2}))


def test_terms_in_streamed_windows_are_refused() -> None:
    with pytest.raises(
        TrainkitError, match=r"micro_batching = MicroBatching\(size=4\)"
    ):
        fit(Terms(cut=None))


def test_terms_take_a_cut_that_is_the_whole_batch() -> None:
    """One micro-batch is a window like any other."""
    module, whole = Terms(cut=MicroBatching(size=100)), Whole()
    fit(module)
    fit(whole)
    assert deviation(module, whole, START) <= TOLERANCE[torch.float64]
