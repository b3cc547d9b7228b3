"""What split windows need of Lightning, torch and torchmetrics that is undocumented."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import nn
from torchmetrics import MeanMetric

from tests.helpers import trainer
from tests.lit.split.common import Split, fit, loader_batches
from tests.zoo.modules import hooked
from trainkit.lit import _compat


class Late(Split):
    """Logs the end of an epoch from within a step."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.hooks = [_compat.current_hook(self)]
        with _compat.as_hook(self, "training_step"):
            self.hooks.append(_compat.current_hook(self))
            self.log("late", 1.0, on_step=True, on_epoch=True)
        self.hooks.append(_compat.current_hook(self))


def test_a_value_can_be_logged_as_from_another_hook() -> None:
    module = Late(cut=None)
    fitted = fit(module)
    assert module.hooks == ["on_train_batch_end", "training_step", "on_train_batch_end"]
    results = fitted.fit_loop.epoch_loop._results.result_metrics
    assert [each.meta.fx for each in results] == ["training_step"]
    assert _compat.current_hook(pl.LightningModule()) == ""


def test_the_hook_is_put_back_after_an_error() -> None:
    module = pl.LightningModule()
    with pytest.raises(KeyError), _compat.as_hook(module, "training_step"):
        raise KeyError
    assert _compat.current_hook(module) == ""


def test_only_the_epoch_for_batch_norm_skips_backward() -> None:
    skipped: dict[int, bool] = {}

    class Noting(Split):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            skipped[self.current_epoch] = _compat.skips_backward(self.trainer)

    class Normed(Noting):
        def __init__(self) -> None:
            super().__init__(cut=None)
            self.norm = nn.BatchNorm1d(2)

    averaging = StochasticWeightAveraging(
        swa_lrs=0.1, swa_epoch_start=1, annealing_epochs=1
    )
    fit(Normed(), averaging, max_epochs=3)
    assert skipped == {0: False, 1: False, 2: False, 3: True}


def test_a_compiled_step_leaves_the_function_as_it_is() -> None:
    traced: list[bool] = []

    def note() -> None:
        traced.append(torch.compiler.is_compiling())

    plain, compiled = Split(cut=None), Split(cut=None)
    compiled._compiler_ctx = {"compiler": "dynamo"}  # type: ignore[assignment]
    assert _compat.uncompiled(plain, note) is note
    untraced = _compat.uncompiled(compiled, note)

    def step(x: torch.Tensor) -> torch.Tensor:
        untraced()
        return x + 1

    torch.compile(step, backend="eager")(torch.zeros(2))
    assert traced == [False]


def test_lightning_says_so_where_it_compiles_a_step() -> None:
    compiled = torch.compile(Split(cut=None), backend="eager")
    module = pl.utilities.compile.from_compiled(compiled)  # type: ignore[attr-defined]
    assert _compat.uncompiled(module, print) is not print


def test_methods_are_replaced_for_a_while() -> None:
    class Owner:
        def one(self) -> int:
            return 1

        def two(self) -> int:
            return 2

    owner = Owner()
    vars(owner)["two"] = lambda: 22  # an instance's own comes back as such
    with _compat.replaced(owner, one=lambda: 10, two=lambda: 20):
        assert (owner.one(), owner.two()) == (10, 20)
    assert (owner.one(), owner.two()) == (1, 22)
    assert list(vars(owner)) == ["two"]


def test_which_batches_reach_the_device_without_a_hook() -> None:
    def transfer(self: Any, batch: Any, *args: Any) -> Any:
        return batch

    own = hooked(pl.LightningModule, transfer_batch_to_device=transfer)()
    assert _compat.transfers_plainly(trainer(), pl.LightningModule())
    assert not _compat.transfers_plainly(trainer(), own)
    seen: list[bool] = []

    class Asking(Split):
        def on_train_start(self) -> None:
            seen.append(_compat.transfers_plainly(self.trainer, self))

    hooks: dict[str, Any] = {"train_dataloader": lambda self: loader_batches()}
    hooks["on_after_batch_transfer"] = transfer
    trainer().fit(Asking(cut=None), hooked(pl.LightningDataModule, **hooks)())
    trainer().fit(Asking(cut=None), loader_batches())
    assert seen == [False, True]


def test_metric_computes_anew_when_it_has_forgotten() -> None:
    metric = MeanMetric()
    metric.update(torch.tensor(1.0))
    before = metric.compute()
    assert metric.compute() is before
    _compat.forget_computed(metric)
    assert metric.compute() is not before
