"""A batch is weighed as `training_step` gets it, whoever has edited it before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from tests.helpers import (
    NAIVE,
    TOLERANCE,
    TokenModule,
    deviation,
    loader,
    pad,
    ragged_sequences,
    token_loss,
    trainer,
    windows_over_ranks,
)
from trainkit import (
    AccumulationCallback,
    AccumulationMixin,
    PerToken,
    PlainComparison,
    WindowMonitor,
)
from trainkit.lit._compat import leaves_fit

EXACT = TOLERANCE[torch.float64]
DATA = ragged_sequences(38)


def hide(batch: Any) -> None:
    """Some labels do not count, more of them in long rows."""
    batch["labels"][:, 3:] = -100


class HidesByItself(TokenModule):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        hide(batch)


class Hides(Callback):
    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        hide(batch)


class Mixed(AccumulationMixin, HidesByItself):
    accumulation = PerToken()


def reference() -> TokenModule:
    module = TokenModule(dtype=torch.float64)
    optimizer = module.configure_optimizers()
    for window in windows_over_ranks(DATA, 4, 4, 1) * 2:
        optimizer.zero_grad()
        batch = pad(window)
        hide(batch)
        token_loss(module.net, batch).backward()
        optimizer.step()
    return module


def off(module: Any, *callbacks: Any) -> float:
    fit = trainer(4, callbacks=list(callbacks))
    fit.fit(module, loader(DATA, 4))
    return deviation(module, reference(), TokenModule(dtype=torch.float64))


OURS = AccumulationCallback(PerToken())
CASES: dict[str, Any] = {
    "module": lambda: (HidesByItself(dtype=torch.float64), OURS),
    "mixin": lambda: (Mixed(dtype=torch.float64),),
    "callback": lambda: (TokenModule(dtype=torch.float64), OURS, Hides()),
    "monitored": lambda: (
        HidesByItself(dtype=torch.float64),
        OURS,
        WindowMonitor(1),
        PlainComparison(),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_batch_edited_before_its_step_equals_the_big_batch(case: str) -> None:
    assert off(*CASES[case]()) <= EXACT


def test_plain_accumulation_of_edited_batches_does_not() -> None:
    assert off(HidesByItself(dtype=torch.float64)) > NAIVE


def test_strategy_object_is_as_before_afterwards() -> None:
    fit = trainer(4, callbacks=[AccumulationCallback(PerToken())])
    fit.fit(TokenModule(), loader(DATA, 4))
    assert "training_step" not in vars(fit.strategy)


class Leaves(Callback):
    """Leaves `fit` as Lightning's finders do: no hook but `teardown` hears of it."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        raise leaves_fit(trainer)


def test_strategy_object_is_as_before_where_fit_is_left_in_between() -> None:
    fit = trainer(4, callbacks=[AccumulationCallback(PerToken()), Leaves()])
    fit.fit(TokenModule(), loader(DATA, 4))
    assert "training_step" not in vars(fit.strategy)
