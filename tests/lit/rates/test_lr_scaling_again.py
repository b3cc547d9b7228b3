"""Rates that were scaled already, or that nothing trains by."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.core.plan.schedulers import deviation
from tests.helpers import trainer
from tests.lit.rates.scaled import (
    EXACT,
    WINDOW,
    Scheduled,
    data,
    fit,
    linear,
    plain,
    times,
)
from trainkit import AccumulationCallback, PerSample

pytestmark = pytest.mark.filterwarnings(
    "ignore:A `OneCycleLR` scheduler is using:RuntimeWarning",
    "ignore:The epoch parameter in `scheduler.step:UserWarning",
    "ignore:To get the last learning rate computed:UserWarning",
    "ignore:Detected call of `lr_scheduler.step:UserWarning",
    "ignore:accumulate_grad_batches=\\d+. the epoch has only:UserWarning",
)


def test_second_fit_with_the_same_callback_is_scaled_once() -> None:
    scaling = linear()
    made = trainer(WINDOW, callbacks=[scaling])
    for _ in range(2):
        module = Scheduled("OneCycleLR-cos")
        made.fit(module, data())
        expected = times(plain("OneCycleLR-cos", 10), [4.0] * 10)
        assert deviation(module.curve, expected) <= EXACT
        made.fit_loop.epoch_progress.reset()
        made.fit_loop.epoch_loop.reset()


def test_optimizer_that_a_module_keeps_is_scaled_once() -> None:
    class Keeps(Scheduled):
        def configure_optimizers(self) -> Any:
            self.kept: Any = getattr(self, "kept", None)
            if self.kept is None:
                self.kept = super().configure_optimizers()
            return self.kept

    module, scaling = Keeps(None), linear()
    for _ in range(2):
        fit(module, scaling)
    assert deviation(module.curve, times(plain(None, 20), [4.0] * 20)) <= EXACT


@pytest.mark.parametrize("with_windows", [True, False])
def test_table_says_the_step_once(with_windows: bool, capsys: Any) -> None:
    """Also where nobody of trainkit divides windows."""
    fit(Scheduled(None), linear(), *[AccumulationCallback(PerSample())] * with_windows)
    text = "per-device batch 3 x accumulation 2 x ranks 1 = 6 samples a step"
    assert capsys.readouterr().out.count(text) == 1


def test_fit_after_an_exception_is_scaled_once() -> None:
    class Fails(Scheduled):
        def on_train_epoch_end(self) -> None:
            raise KeyError("a user's mistake")

    scaling = linear()
    with pytest.raises(KeyError):
        fit(Fails(None), scaling)
    curve = fit(Scheduled(None), scaling).curve
    assert deviation(curve, times(plain(None, 10), [4.0] * 10)) <= EXACT


def test_development_run_is_scaled() -> None:
    module = fit(Scheduled(None), linear(), fast_dev_run=True)
    assert deviation(module.curve, times(plain(None, 1), [2.0])) <= EXACT


def test_validation_alone_scales_nothing() -> None:
    class Validates(Scheduled):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

    scaling = linear()
    trainer(callbacks=[scaling]).validate(Validates(None), data())
    assert scaling.effective_batch is None
    assert scaling.state_dict() == {}


def test_rates_are_the_same_object_for_every_step() -> None:
    """Nothing is scaled again where nothing has changed."""
    module = fit(Scheduled(None, (0.1,)), linear())
    assert {row[0] for row in module.curve} == {0.4}
    assert torch.isfinite(module.weight[0]).all()
