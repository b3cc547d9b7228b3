"""What a mixin module keeps of Lightning's own promises: hooks set on the instance,
and the check of schedulers."""

from __future__ import annotations

import copy
import pickle
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import pytorch_lightning as old
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from tests.helpers import (
    TOLERANCE,
    TokenModule,
    deviation,
    loader,
    ragged_sequences,
    train_on_windows,
    trainer,
    windows_over_ranks,
)
from tests.lit.front.test_mixin import OldMixed, old_trainer
from tests.lit.windows.half import fit as fit_half
from trainkit import AccumulationCallback, AccumulationMixin, PerToken
from trainkit.lit.front.mixin_callback import MixinCallback

EXACT = TOLERANCE[torch.float64]
DATA = ragged_sequences(38)
BATCH, WINDOW = 4, 4


class Mixed(AccumulationMixin, TokenModule):
    accumulation = PerToken()


class Extends(Mixed):
    def configure_callbacks(self) -> Any:
        return [*super().configure_callbacks(), Counter()]


class Counter(pl.Callback):
    def __init__(self) -> None:
        self.num_batches = 0

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.num_batches += 1


def fitted(module: Any, **options: Any) -> pl.Trainer:
    fit = trainer(WINDOW, **options)
    fit.fit(module, loader(DATA, BATCH))
    return fit


def assert_exact(module: torch.nn.Module) -> None:
    start, reference = (TokenModule(dtype=torch.float64) for _ in range(2))
    train_on_windows(reference, windows_over_ranks(DATA, BATCH, WINDOW, 1))
    assert deviation(module, reference, start) <= EXACT


def drivers(fit: Any) -> int:
    return sum(isinstance(each, MixinCallback) for each in callbacks_of(fit))


def callbacks_of(fit: Any) -> list[Any]:
    return fit.callbacks


# ---- configure_callbacks on the instance ---------------------------------------------


def some_callbacks() -> list[pl.Callback]:
    return [Counter()]


def one_callback() -> pl.Callback:
    return Counter()


def no_callbacks() -> None:
    return None


@pytest.mark.parametrize("kind", [Mixed, Extends])
@pytest.mark.parametrize("own", [some_callbacks, one_callback, no_callbacks])
def test_callbacks_of_the_instance_are_extended(kind: type[Mixed], own: Any) -> None:
    module = kind(dtype=torch.float64)
    module.configure_callbacks = own
    fit = fitted(module)
    assert_exact(module)
    assert drivers(fit) == 1
    counters = [each for each in callbacks_of(fit) if isinstance(each, Counter)]
    assert [each.num_batches for each in counters] == [20] * (own is not no_callbacks)


def test_what_is_no_function_on_the_instance_is_none() -> None:
    module = Mixed(dtype=torch.float64)
    module.configure_callbacks = None  # type: ignore[assignment]  # as Lightning takes it
    assert drivers(fitted(module)) == 1
    assert_exact(module)


def test_callbacks_of_a_patched_instance_are_extended() -> None:
    """As Lightning's own tests give a module callbacks."""
    module = Mixed(dtype=torch.float64)
    counter = Counter()
    with patch.object(module, "configure_callbacks", return_value=[counter]) as asked:
        fit = fitted(module)
    asked.assert_called_once_with()
    assert drivers(fit) == 1
    assert counter.num_batches == 20
    assert_exact(module)
    assert "configure_callbacks" not in vars(module)
    assert drivers(fitted(Mixed())) == 1


@pytest.mark.parametrize("kind", [Mixed, Extends])
def test_an_instance_that_extends_its_class_has_one_driver(kind: type[Mixed]) -> None:
    module = kind(dtype=torch.float64)
    before = module.configure_callbacks
    module.configure_callbacks = lambda: [*before(), Counter()]
    assert drivers(fitted(module)) == 1
    assert_exact(module)
    del module.configure_callbacks
    assert module.configure_callbacks == before
    with pytest.raises(AttributeError):
        del module.configure_callbacks


def test_the_naive_way_is_not_exact() -> None:
    """The control: the same callbacks without the mixin's."""
    module: Any = TokenModule(dtype=torch.float64)
    module.configure_callbacks = some_callbacks
    assert drivers(fitted(module)) == 0
    with pytest.raises(AssertionError):
        assert_exact(module)


@pytest.mark.parametrize(
    "way", [lambda each: pickle.loads(pickle.dumps(each)), copy.deepcopy]
)
def test_such_a_module_can_be_sent(way: Any) -> None:
    module = Mixed(dtype=torch.float64)
    module.configure_callbacks = some_callbacks
    sent = way(module)
    assert vars(sent)["configure_callbacks"] is some_callbacks
    assert drivers(fitted(sent)) == 1
    assert_exact(sent)


def test_callbacks_of_an_instance_of_the_other_namespace() -> None:
    module = OldMixed()
    module.configure_callbacks = lambda: [old.Callback()]
    fit = old_trainer()
    fit.fit(module, loader(DATA, BATCH))
    assert drivers(fit) == 1
    assert_exact(module)


# ---- schedulers with a step of their own ---------------------------------------------


class Deaf:
    """A scheduler that is none of torch's: its step wants a number."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.num_steps = 0

    def step(self, number: int) -> None:
        self.num_steps = number

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Wrong(Mixed):
    interval = "epoch"

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        config = {"scheduler": Deaf(optimizer), "interval": self.interval}
        return {"optimizer": optimizer, "lr_scheduler": config}


class Right(Wrong):
    """Says how such a scheduler steps, without Lightning's own way."""

    interval = "step"

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(scheduler.num_steps + 1)


@pytest.mark.parametrize("hold", [True, False])
@pytest.mark.parametrize("again", [True, False])
def test_a_scheduler_of_another_kind_is_refused_before_training(
    hold: bool, again: bool
) -> None:
    module = Wrong()
    module.hold_schedulers = hold
    if again:  # nothing of an earlier fit hides it
        before: Any = Scheduled()
        before.hold_schedulers = hold
        fit_half(before, "16-mixed")
        assert "lr_scheduler_step" not in vars(before)
        module.configure_optimizers = Mixed.configure_optimizers.__get__(module)
        fitted(module)
        del module.configure_optimizers
    with pytest.raises(MisconfigurationException, match="scheduler `Deaf` doesn't fol"):
        fitted(module)


class Scheduled(Mixed):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
        config = {"scheduler": scheduler, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": config}


class WithSuper(Scheduled):
    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        super().lr_scheduler_step(scheduler, metric)


class WithoutSuper(Scheduled):
    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()


def own_step(scheduler: Any, metric: Any) -> None:
    scheduler.step()


def on_the_instance() -> Mixed:
    module = Scheduled()
    module.lr_scheduler_step = own_step
    return module


SCHEDULER_FIRST = "ignore:Detected call of `lr_scheduler.step..` before:UserWarning"


@pytest.mark.filterwarnings(SCHEDULER_FIRST)
@pytest.mark.parametrize(
    ("make", "hold", "late"),
    [
        (Scheduled, False, False),
        (Scheduled, True, True),
        (WithSuper, True, False),
        (WithSuper, False, True),
        (WithoutSuper, True, True),
        (WithoutSuper, False, False),
        (on_the_instance, True, False),
        (on_the_instance, False, True),
    ],
)
def test_a_step_of_the_users_own_is_held(make: Any, hold: bool, late: bool) -> None:
    module = make()
    if late:
        module.on_train_epoch_start = lambda: setattr(module, "hold_schedulers", hold)
    else:
        module.hold_schedulers = hold
    before = vars(module).get("lr_scheduler_step")
    fit = fit_half(module, "16-mixed", init_scale=2.0**28, epochs=4)
    skipped = module._windows().num_skipped_steps
    assert 0 < skipped < fit.global_step == 12
    moved = fit.lr_scheduler_configs[0].scheduler.last_epoch  # type: ignore[union-attr]
    assert moved == 12 - (skipped if hold else 0)
    assert vars(module).get("lr_scheduler_step") is before


@pytest.mark.filterwarnings(SCHEDULER_FIRST)
@pytest.mark.parametrize("hold", [False, True])
def test_a_scheduler_of_another_kind_is_held(hold: bool) -> None:
    module: Any = Right()
    module.hold_schedulers = hold
    fit = fit_half(module, "16-mixed", init_scale=2.0**28, epochs=4)
    skipped = module._windows().num_skipped_steps
    moved: Any = fit.lr_scheduler_configs[0].scheduler
    assert moved.num_steps == 12 - (skipped if hold else 0)


def test_a_module_copied_within_a_fit_trains_by_itself() -> None:
    copies: list[Any] = []

    class Copying(pl.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            copies[:] = [
                copy.deepcopy(pl_module),
                pickle.loads(pickle.dumps(pl_module)),
            ]

    module: Any = Scheduled()
    module.hold_schedulers = True
    fit_half(module, "16-mixed", Copying())
    for each in copies:
        fit_half(each, "16-mixed")
        assert "lr_scheduler_step" not in vars(each)


def test_nothing_stays_after_an_error() -> None:
    class Fails(Scheduled):
        hold_schedulers = True

        def on_train_epoch_end(self) -> None:
            assert "lr_scheduler_step" in vars(self)
            raise RuntimeError("on purpose")

    module: Any = Fails()
    with pytest.raises(RuntimeError, match="on purpose"):
        fit_half(module, "16-mixed")
    assert "lr_scheduler_step" not in vars(module)


def test_without_a_scaler_nothing_is_put_between() -> None:
    module = Scheduled()
    module.hold_schedulers = True
    seen: list[bool] = []
    module.on_train_epoch_end = lambda: seen.append("lr_scheduler_step" in vars(module))
    fitted(module)
    assert seen == [False, False]


def test_callback_and_mixin_have_the_same_driver() -> None:
    """The control of `drivers`."""
    fit = trainer(WINDOW, callbacks=[AccumulationCallback(PerToken())])
    fit.fit(TokenModule(), loader(DATA, BATCH))
    assert drivers(fit) == 0
