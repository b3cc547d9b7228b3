"""What trainkit uses of Lightning and torch beyond their documentation still holds.

What the tests of a caller show by themselves has no test here.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from tests.helpers import TokenModule, loader, pad, ragged_sequences, trainer
from tests.lit.fronts import Mixed, micro_batches
from tests.lit.split.common import Split, fit, loader_batches
from tests.zoo.modules import hooked, scaled
from trainkit.lit import _compat
from trainkit.lit.resume import _compat as resuming

DATA = ragged_sequences(38)
BATCH, WINDOW = 4, 4


@pytest.mark.parametrize(("stop", "expected"), [(1, 1), (5, 5), (10, 0)])
def test_batches_into_epoch_counts_those_of_a_checkpoint(
    tmp_path: Path, stop: int, expected: int
) -> None:
    """Saved by a callback in `on_train_batch_end`, and once at the end of the epoch."""
    path = tmp_path / "one.ckpt"

    def saves(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx + 1 == stop:
            self.trainer.save_checkpoint(path)

    module = hooked(Mixed, on_train_batch_end=saves)()
    trainer(1, max_epochs=1).fit(module, micro_batches(DATA))
    checkpoint = torch.load(path, weights_only=True)
    assert resuming.batches_into_epoch(checkpoint) == expected
    assert resuming.batches_into_epoch({"state_dict": {}}) == 0


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


def test_forget_iterator_leaves_persistent_workers_to_the_original() -> None:
    how: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}
    original = DataLoader(DATA, BATCH, collate_fn=pad, **how)  # type: ignore[arg-type]
    iterator = iter(original)
    next(iterator)
    shared = copy.copy(original)
    assert iter(shared) is iterator  # the negative control: the pass starts anew
    next(iterator)
    mine = iter(_compat.forget_iterator(copy.copy(original)))
    assert mine is not iterator
    assert (len(list(mine)), len(list(iterator))) == (10, 9)


@pytest.mark.parametrize(("mode", "length"), [("min_size", 2), ("max_size", 10)])
def test_combined_loader_holds_loaders_and_their_mode(mode: Any, length: int) -> None:
    found = []

    class Looks(TokenModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch["a"], batch_idx)

        def on_train_start(self) -> None:
            combined = _compat.combined_loader(self.trainer)
            found.extend([combined.flattened, copy.copy(combined)])

    pair = {"a": loader(DATA, BATCH), "b": loader(DATA[:8], BATCH)}
    fit = trainer(max_epochs=1, limit_train_batches=2)
    fit.fit(Looks(), CombinedLoader(pair, mode))
    assert found[0] == list(pair.values())
    found[1].limits = None
    assert len(list(found[1])) == length


def test_average_of_finds_the_model_that_lightning_averages() -> None:
    callback, found = EMAWeightAveraging(decay=0.5), []

    def ends(self: Any) -> None:
        found.append(_compat.average_of(callback))

    assert _compat.average_of(callback) is None
    module = hooked(TokenModule, on_train_end=ends)()
    trainer(max_epochs=1, callbacks=[callback]).fit(module, loader(DATA, BATCH))
    assert isinstance(found[0], AveragedModel)
    assert isinstance(found[0].module, TokenModule)
    assert _compat.average_of(Callback()) is None


# ---- resumed runs --------------------------------------------------------------------

KINDS = ("mean", "sum", "max", "min")


class Logs(TokenModule):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for name in KINDS:
            how: dict[str, Any] = {"reduce_fx": name, "batch_size": batch_idx + 1}
            self.log(name, float((batch_idx * 5) % 7), on_epoch=True, **how)


def test_epoch_sums_taken_apart_and_added_are_those_of_the_whole() -> None:
    def logged(interrupts: bool, adds: bool = False) -> dict[str, float]:
        states: dict[str, Any] = {}

        def ends(self: Any, trainer: Any, module: Any, *args: Any) -> None:
            sums = resuming.epoch_sums(trainer)
            if args[-1] == 2 and interrupts:
                states.update({k: resuming.sum_state(each) for k, each in sums.items()})
                for each in sums.values():
                    each.reset()
            if args[-1] == 5 and adds:
                for key, each in sums.items():
                    resuming.add_sum_state(each, states[key])

        callbacks = [hooked(Callback, on_train_batch_end=ends)()]
        fit = trainer(callbacks=callbacks, max_epochs=1)
        fit.fit(Logs(), loader(DATA[:24], BATCH))
        return {name: float(fit.callback_metrics[name]) for name in KINDS}

    whole = logged(interrupts=False)
    assert logged(interrupts=True, adds=True) == pytest.approx(whole, rel=1e-6)
    assert logged(interrupts=True) != pytest.approx(whole, rel=1e-3)


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


def test_only_the_epoch_for_batch_norm_skips_backward() -> None:
    skipped: dict[int, bool] = {}

    class Normed(Split):
        def __init__(self) -> None:
            super().__init__(cut=None)
            self.norm = nn.BatchNorm1d(2)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            skipped[self.current_epoch] = _compat.skips_backward(self.trainer)

    averages = StochasticWeightAveraging(0.1, swa_epoch_start=1, annealing_epochs=1)
    fit(Normed(), averages, max_epochs=3)
    assert skipped == {0: False, 1: False, 2: False, 3: True}


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
