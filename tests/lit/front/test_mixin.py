"""The mixin: where it stands, what a module may override, and what it must say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning as old
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.helpers import deviation, loader, trainer, weights
from tests.lit.fronts import (
    RAGGED,
    SEQUENCES,
    WINDOW,
    big_batch,
    drivers_of,
    merged,
    ragged,
)
from tests.zoo.modules import Manual, Mixed, OldMixed, Plain, hooked, old_trainer
from trainkit import (
    AccumulationCallback,
    AccumulationMixin,
    AccumulationStrategy,
    MicroBatching,
    PerSample,
    PerToken,
    Uniform,
)
from trainkit.errors import TrainkitError

START = weights(Plain())
BIG = big_batch(SEQUENCES).end


def fitted(
    module: Any, *callbacks: Any, window: int = WINDOW, data: Any = None, **options: Any
) -> Any:
    fit = trainer(window, callbacks=list(callbacks), **options)
    fit.fit(module, ragged(RAGGED) if data is None else data)
    return fit


def is_exact(module: Any) -> bool:
    return deviation(module, BIG, START) <= 1e-10


@pytest.mark.parametrize(
    ("base", "text"),
    [
        (pl.LightningModule, "class Late: AccumulationMixin must come before"),
        (old.LightningModule, "class Late: AccumulationMixin must come before"),
        (Plain, r"Write class Late\(AccumulationMixin, "),
    ],
)
def test_wrong_order_is_refused_when_the_class_is_made(base: type, text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        type("Late", (base, AccumulationMixin), {})


class Brings(AccumulationMixin):
    """The mixin inside another, made before any LightningModule is there."""

    accumulation = PerToken()


class Through(Brings, Plain): ...


class Counter(pl.Callback):
    def __init__(self) -> None:
        self.num_batches = 0

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.num_batches += 1


class Extends(Mixed):
    """Overrides one hook and extends it."""

    def configure_callbacks(self) -> Any:
        inherited: Any = super().configure_callbacks()
        return [*inherited, Counter()]


class Foreign:
    """A base class of somebody else, which does not know that others follow."""

    def configure_callbacks(self) -> Any:
        return []


class Shadowed(Foreign, Mixed): ...  # type: ignore[misc]


class ChoosesLate(AccumulationMixin, Plain):
    """Knows what a batch weighs once the data are there."""

    def setup(self, stage: str) -> None:
        self.accumulation = PerToken()


def nothing(self: Any, *args: Any, **kwargs: Any) -> None: ...


HOOKS = (
    "on_before_optimizer_step", "on_before_backward", "on_after_backward",
    "on_train_batch_start", "on_train_batch_end", "on_before_zero_grad",
    "on_train_start", "on_train_epoch_end", "on_fit_start", "setup", "teardown",
    "on_save_checkpoint",
)  # fmt: skip
"""The mixin leaves them to the module: none of them needs `super()`."""
OVERRIDES = hooked(Mixed, **dict.fromkeys(HOOKS, nothing))
KINDS = [Mixed, Through, Extends, Shadowed, ChoosesLate, OVERRIDES]


@pytest.mark.parametrize("kind", KINDS)
def test_subclass_equals_the_big_batch(kind: Any) -> None:
    module = kind()
    fitted(module)
    assert is_exact(module)


def test_one_trainer_fits_several_modules_one_after_another() -> None:
    """A mixin's callback stays in the Trainer's list: it drives its own module only."""
    fit: Any = trainer(WINDOW)
    for kind in (Mixed, Mixed, ChoosesLate, Plain):
        module = kind()
        fit.fit(module, ragged(RAGGED))
        fit.fit_loop.epoch_progress.reset()
        assert is_exact(module) is (kind is not Plain)
    assert not drivers_of(fit)


OURS = [AccumulationCallback(PerToken()) for _ in range(2)]


@pytest.mark.parametrize(
    ("make", "callbacks", "text"),
    [
        (lambda: Mixed(strategy=PerToken), [], "strategy: must be an AccumulationStr"),
        (lambda: Mixed(strategy="tokens"), [], "strategy: must be an AccumulationStr"),
        (Mixed, OURS[:1], r"one driver, and 2 are present \(Accu"),
        (Plain, OURS, "remove AccumulationCallback from the"),
    ],
)
def test_what_no_module_may_do_is_refused(make: Any, callbacks: Any, text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        fitted(make(), *callbacks)


# ---- configure_callbacks -------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "number"), [(lambda: [Counter()], 1), (Counter, 1), (lambda: None, 0)]
)
def test_callbacks_of_the_class_are_extended(own: Any, number: int) -> None:
    """Several, one or no one, as Lightning takes them."""
    module = hooked(Extends, configure_callbacks=lambda self: own())()
    fit = fitted(module)
    assert is_exact(module)
    assert len(drivers_of(fit)) == 1
    counters = [each for each in fit.callbacks if isinstance(each, Counter)]
    assert [each.num_batches for each in counters] == [20] * number


def test_those_of_an_instance_are_refused() -> None:
    """It would train as plain Lightning, without a word."""
    with pytest.raises(TrainkitError, match=r"Mixed\.configure_callbacks: it was"):
        Mixed().configure_callbacks = Counter  # type: ignore[method-assign]


def test_callbacks_of_the_other_namespace() -> None:
    own = hooked(OldMixed, configure_callbacks=lambda self: [old.Callback()])
    module, fit = own("sgd"), old_trainer(WINDOW)
    fit.fit(module, ragged(RAGGED))
    assert len(drivers_of(fit)) == 1
    assert is_exact(module)


def through(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.net(x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("method", ["script", "trace"])
def test_torchscript_gives_what_the_module_gives(method: Any) -> None:
    module: Any = hooked(Mixed, forward=through)()
    module.net, rows = nn.Sequential(nn.Linear(3, 2), nn.ReLU()), torch.ones(1, 3)
    module.example_input_array = rows
    with torch.no_grad():
        assert torch.equal(module.to_torchscript(method=method)(rows), module(rows))
    with pytest.raises(RuntimeError, match="not attached to a `Trainer`"):
        _ = module.effective_batch


# ---- the strategy --------------------------------------------------------------------

NO_STRATEGY = r"accumulation: a module with AccumulationMixin must say.*PerSample\(\)"


def too_late(self: Any, batch: Any, batch_idx: int) -> None:
    raise AssertionError("too late")


SILENT = hooked(Mixed, accumulation=None)
LOGS = hooked(
    SILENT, validation_step=lambda self, b, i: self.log("val", self.loss_of(b))
)
LOGS_EXACTLY = hooked(
    SILENT, validation_step=lambda self, b, i: self.log_exact("val", self.loss_of(b), b)
)


def turns_silent(self: Any) -> None:
    self.accumulation = None if self.current_epoch else PerToken()


@pytest.mark.filterwarnings("ignore:accumulation. an open window")
@pytest.mark.parametrize(
    "fit",
    [
        lambda: fitted(SILENT(), window=1),
        # Before the sanity check.
        lambda: trainer(4).fit(
            hooked(SILENT, validation_step=too_late)(), ragged(RAGGED), ragged(RAGGED)
        ),
        lambda: old_trainer().fit(
            hooked(OldMixed, accumulation=None)(), ragged(RAGGED)
        ),
        lambda: fitted(hooked(Manual, accumulation=None)()),
        lambda: fitted(SILENT(cut=MicroBatching(size=2))),
        lambda: fitted(hooked(Mixed, on_train_epoch_start=turns_silent)()),
        lambda: trainer().validate(LOGS_EXACTLY(), ragged(RAGGED), verbose=False),
    ],
)
def test_module_without_a_strategy_is_refused(fit: Callable[[], Any]) -> None:
    """As `Uniform()`, the default of before, it was 35 % off on ragged data."""
    with pytest.raises(TrainkitError, match=NO_STRATEGY) as refused:
        fit()
    for name in ("PerToken()", "Uniform()", ".accumulation", "--accumulation="):
        assert name in str(refused.value)


def test_without_fit_nothing_is_asked() -> None:
    results = trainer().validate(LOGS(), ragged(RAGGED), verbose=False)
    assert "val" in results[0]


def test_uniform_says_when_it_is_right(capsys: Any) -> None:
    """And is never called exact; other strategies say nothing of it."""
    fitted(Mixed(strategy=Uniform()), data=loader(SEQUENCES, 3))
    said = capsys.readouterr().out
    assert "exact" not in said
    assert "every micro-batch has weight 1" in said
    fitted(Mixed())
    said = capsys.readouterr().out
    assert "alike" not in said
    assert "weight 1" not in said


@dataclass
class ByLabel(AccumulationStrategy):
    """Two of them cannot be compared by ==, but for their very tensors."""

    weights: torch.Tensor

    def weight(self, batch: Any) -> torch.Tensor:
        labels = batch["labels"]
        return self.weights[labels[labels != -100]].sum()


RATES = [torch.linspace(0.5, last, 13, dtype=torch.float64) for last in (2, 7)]


class MadeAnew(Mixed):
    """Makes a strategy whenever it is asked for one, of weights that may turn."""

    turns = False

    @property
    def accumulation(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        has_turned = self.turns and self._trainer and self.current_epoch
        return ByLabel(RATES[bool(has_turned)])

    def loss_of(self, batch: Any) -> torch.Tensor:
        logits, labels = self.net(batch["ids"]).flatten(0, 1), batch["labels"].flatten()
        return cross_entropy(logits, labels, weight=RATES[0])


def test_strategy_that_holds_tensors_may_be_made_anew() -> None:
    """Made of the same weights it is the same."""
    module, big = MadeAnew(), MadeAnew()
    fitted(module)
    optimizer: Any = big.configure_optimizers()
    for batch in [*ragged(merged(RAGGED))] * 2:
        optimizer.zero_grad()
        big.loss_of(batch).backward()
        optimizer.step()
    assert deviation(module, big, START) <= 1e-10


def assigns(name: str, value: Any) -> Any:
    def assign(self: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            setattr(self, name, value)

    return {"on_train_batch_start": assign}


@pytest.mark.filterwarnings("ignore:accumulation. an open window")
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (hooked(Mixed, **assigns("accumulation", PerSample())), "Mixed.accumulation:"),
        (hooked(Manual, **assigns("accumulation", Uniform())), "Manual.accumulation:"),
        (hooked(MadeAnew, turns=True), "MadeAnew.accumulation: it was"),
        (
            hooked(Mixed, **assigns("micro_batching", MicroBatching(size=1))),
            "Mixed.micro_batching: it was None when training began",
        ),
    ],
)
def test_what_is_assigned_in_a_fit_is_refused(kind: Any, text: str) -> None:
    with pytest.raises(TrainkitError, match=f"(?s){text}.*It cannot change during"):
        fitted(kind())
