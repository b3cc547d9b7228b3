"""What trainkit uses of Lightning and torch beyond their documentation still holds.

What the tests of a caller show by themselves has no test here.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torchmetrics import MeanMetric

from tests.helpers import TokenModule, loader, ragged_sequences, trainer
from tests.lit.split.common import Split, fit
from tests.zoo.modules import hooked, scaled
from trainkit.lit import _compat

DATA = ragged_sequences(38)
BATCH, WINDOW = 4, 4


def test_scaler_of_finds_the_scaler_of_the_precision_plugin() -> None:
    for enabled in (True, False):
        own = scaled(enabled=enabled)["plugins"]
        found = _compat.scaler_of(trainer(plugins=[own]))
        assert (found is own.scaler) is enabled
    assert _compat.scaler_of(trainer()) is None


@pytest.mark.parametrize("fused", [True, False])
def test_a_scaler_unscales_before_the_step_or_in_it(fused: bool) -> None:
    weight, seen = nn.Parameter(torch.ones(1)), []
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(weight.sum()).backward()
    optimizer.register_step_pre_hook(lambda *_: seen.append(float(weight.grad or 0)))
    assert _compat.unscales_itself(optimizer) is fused
    assert _compat.is_scaled(scaler, optimizer)
    if not fused:
        scaler.unscale_(optimizer)
        assert not _compat.is_scaled(scaler, optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert _compat.is_scaled(scaler, optimizer)
    assert seen == [4.0 if fused else 1.0]
    assert weight.item() == 0.0


def test_what_a_running_fit_tells() -> None:
    """Its steps as Lightning logs them, what the loader has yielded, its optimizers,
    and metrics that were put in."""
    steps, seen, optimizers, metrics = [], set(), [], []

    class Looks(TokenModule):
        def on_train_start(self) -> None:
            optimizers.extend([self.optimizers(), self.trainer.optimizers[0]])
            _compat.add_callback_metrics(self.trainer, {"x": torch.tensor(2.0)})

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            seen.add(_compat.num_batches_seen(self.trainer) - batch_idx)
            metrics.append(float(self.trainer.callback_metrics["x"]))

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            steps.append(_compat.logged_step(self.trainer))

    trainer(WINDOW).fit(Looks(), loader(DATA, BATCH))
    assert steps == list(range(6))
    assert seen == {1}
    assert metrics == [2.0] * 20
    wrapped, plain = optimizers
    assert wrapped is not plain
    assert _compat.unwrapped(wrapped) is _compat.unwrapped(plain) is plain


@pytest.mark.parametrize("owner", ["module", "data module"])
@pytest.mark.filterwarnings("ignore:You have overridden `on_before_batch_transfer`")
def test_before_batch_transfer_equals_the_hook_of_its_owner(owner: str) -> None:
    """The data module's comes first, where there is one that has it."""
    seen: list[tuple[Any, Any]] = []

    def transfer(self: Any, batch: Any, dataloader_idx: int) -> Any:
        by_data = isinstance(self, pl.LightningDataModule)
        return {**batch, "by": "data module" if by_data else "module"}

    def starts(self: Any, batch: Any, batch_idx: int) -> None:
        again = {name: batch[name] for name in ("ids", "labels")}
        found = _compat.before_batch_transfer(self, again)
        seen.append((batch["by"], found["by"]))

    hooks: dict[str, Any] = {"on_before_batch_transfer": transfer}
    data = {"train_dataloader": lambda self: loader(DATA, BATCH)}
    module = hooked(TokenModule, on_train_batch_start=starts, **hooks)()
    own = hooks if owner == "data module" else {}
    trainer(max_epochs=1).fit(module, hooked(pl.LightningDataModule, **data, **own)())
    assert set(seen) == {(owner, owner)}


def test_end_validation_gives_the_modes_back() -> None:
    seen: list[list[bool]] = []

    def begins(self: Any, trainer: Any, module: Any) -> None:
        module.net.eval()  # on purpose
        seen.append([part.training for part in module.modules()])

    def ends(self: Any, trainer: Any, module: Any) -> None:
        _compat.end_validation(trainer)
        seen.append([part.training for part in module.modules()])

    looks = hooked(Callback, on_train_start=begins, on_validation_end=ends)()
    module = hooked(TokenModule, validation_step=lambda self, batch, batch_idx: None)()
    fit = trainer(callbacks=[looks], max_epochs=1, num_sanity_val_steps=0)
    fit.fit(module, loader(DATA, BATCH), loader(DATA, BATCH))
    assert seen[0] == seen[1]
    assert len(set(seen[0])) == 2


# ---- split windows -------------------------------------------------------------------


class Late(Split):
    """Logs the end of an epoch from within a step."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.hooks = [_compat.current_hook(self)]
        with _compat.as_hook(self, "training_step"):
            self.hooks.append(_compat.current_hook(self))
            self.log("late", 1.0, on_step=True, on_epoch=True)
        self.hooks.append(_compat.current_hook(self))


def test_a_value_can_be_logged_as_from_another_hook() -> None:
    """Which is put back, after an error too."""
    module = Late(cut=None)
    fitted = fit(module)
    assert module.hooks == ["on_train_batch_end", "training_step", "on_train_batch_end"]
    results = fitted.fit_loop.epoch_loop._results.result_metrics
    assert [each.meta.fx for each in results] == ["training_step"]
    bare = pl.LightningModule()
    assert _compat.current_hook(bare) == ""
    with pytest.raises(KeyError), _compat.as_hook(bare, "training_step"):
        raise KeyError
    assert _compat.current_hook(bare) == ""


def test_a_compiled_step_leaves_the_function_as_it_is() -> None:
    """And Lightning says so where it compiles one."""
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
    by_lightning: Any = torch.compile(Split(cut=None), backend="eager")
    module = pl.utilities.compile.from_compiled(by_lightning)  # type: ignore[attr-defined]
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


def test_metric_computes_anew_when_it_has_forgotten() -> None:
    metric = MeanMetric()
    metric.update(torch.tensor(1.0))
    before = metric.compute()
    assert metric.compute() is before
    _compat.forget_computed(metric)
    assert metric.compute() is not before
