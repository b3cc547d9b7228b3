"""The mixin: where it stands, what a module may override, and what brings it."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import pytorch_lightning as old
import torch
from torch import nn

from tests.helpers import deviation, trainer, weights
from tests.lit.fronts import RAGGED, SEQUENCES, WINDOW, big_batch, drivers_of, ragged
from tests.zoo.callbacks import SENT
from tests.zoo.modules import Mixed, OldMixed, Plain, hooked, old_trainer
from trainkit import AccumulationCallback, AccumulationMixin, PerToken
from trainkit.errors import TrainkitError

START = weights(Plain())
BIG = big_batch(SEQUENCES).end


def fitted(module: Any, *callbacks: Any, **options: Any) -> Any:
    fit = trainer(WINDOW, callbacks=list(callbacks), **options)
    fit.fit(module, ragged(RAGGED))
    return fit


def is_exact(module: Any) -> bool:
    return deviation(module, BIG, START) <= 1e-10


# ---- the order of the bases ----------------------------------------------------------


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


def ours() -> AccumulationCallback:
    return AccumulationCallback(PerToken())


@pytest.mark.parametrize(
    ("make", "callbacks", "text"),
    [
        (lambda: Mixed(strategy=PerToken), [], "strategy: must be an AccumulationStr"),
        (lambda: Mixed(strategy="tokens"), [], "strategy: must be an AccumulationStr"),
        (Mixed, [ours()], r"one driver, and 2 are present \(Accu"),
        (Plain, [ours(), ours()], "remove AccumulationCallback from the"),
    ],
)
def test_what_no_module_may_do_is_refused(make: Any, callbacks: Any, text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        fitted(make(), *callbacks)


# ---- configure_callbacks on the instance ---------------------------------------------


def some_callbacks() -> list[pl.Callback]:
    return [Counter()]


def one_callback() -> pl.Callback:
    return Counter()


def no_callbacks() -> None:
    return None


OWN = [some_callbacks, one_callback, no_callbacks]
"""As Lightning takes them."""


@pytest.mark.parametrize("own", OWN)
def test_callbacks_of_the_instance_are_extended(own: Any) -> None:
    module = Extends()
    module.configure_callbacks = own
    fit = fitted(module)
    assert is_exact(module)
    assert len(drivers_of(fit)) == 1
    counters = [each for each in fit.callbacks if isinstance(each, Counter)]
    assert [each.num_batches for each in counters] == [20] * (own in OWN[:2])


def test_an_instance_that_extends_or_patches_its_class_has_one_driver() -> None:
    """As Lightning's own tests give a module callbacks."""
    module, counter = Extends(), Counter()
    before = module.configure_callbacks
    module.configure_callbacks = lambda: [*before(), Counter()]
    assert len(drivers_of(fitted(module))) == 1
    assert is_exact(module)
    del module.configure_callbacks
    with patch.object(module, "configure_callbacks", return_value=[counter]) as asked:
        fit = fitted(module)
    asked.assert_called_once_with()
    assert len(drivers_of(fit)) == 1
    assert counter.num_batches == 20
    assert "configure_callbacks" not in vars(module)


@pytest.mark.parametrize("way", SENT)
def test_such_a_module_can_be_sent(way: str) -> None:
    module: Any = Mixed()
    module.configure_callbacks = some_callbacks
    sent = SENT[way](module)
    assert vars(sent)["configure_callbacks"] is some_callbacks
    assert len(drivers_of(fitted(sent))) == 1
    assert is_exact(sent)


def test_callbacks_of_an_instance_of_the_other_namespace() -> None:
    module = OldMixed("sgd")
    module.configure_callbacks = lambda: [old.Callback()]
    fit = old_trainer(WINDOW)
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
