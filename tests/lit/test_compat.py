"""What trainkit uses of Lightning and torch beyond their documentation still holds.

What the tests of a caller show by themselves has no test here.
"""

from __future__ import annotations

import functools
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from tests.helpers import TokenModule, loader, ragged_sequences, trainer
from tests.lit.probe.finding import Data, Net, rows
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


# ---- a Trainer aside -----------------------------------------------------------------


def leave(trainer: Any, *args: Any) -> None:
    raise _compat.leaves_fit(trainer)


def test_leaving_a_fit_tears_down_and_is_no_error() -> None:
    called: list[str] = []

    class Torn(Net):
        def teardown(self, stage: str) -> None:
            called.append(stage)

        def on_exception(self, exception: BaseException) -> None:
            called.append("exception")

    fit, module = (
        trainer(callbacks=[LambdaCallback(on_train_batch_start=leave)]),
        Torn(),
    )
    fit.fit(module, Data())
    assert called == ["fit"]
    assert module.sizes == []
    assert fit.state.finished


def test_a_copied_trainer_shares_what_is_not_lightnings() -> None:
    fit = trainer(max_epochs=1, callbacks=[Callback()])
    fit.fit(Net(), Data())
    other = _compat.copied_trainer(fit)

    def parts(trainer: Any) -> list[Any]:
        loop, strategy = trainer.fit_loop, trainer.strategy
        return [
            trainer, trainer.state, loop, loop.epoch_progress.total, loop.epoch_loop,
            loop.epoch_loop.batch_progress.current, loop.epoch_loop.val_loop,
            loop.epoch_loop.automatic_optimization.optim_progress, strategy,
            trainer._signal_connector, trainer._data_connector,
            strategy.precision_plugin,
        ]  # fmt: skip

    pairs = list(zip(parts(fit), parts(other), strict=True))
    assert all(type(one) is type(two) for one, two in pairs)
    assert [type(one) for one, two in pairs if one is two] == []
    assert other.fit_loop.trainer is other.fit_loop.epoch_loop.trainer is other
    assert other.global_step == fit.global_step == 24
    for shared in ("callbacks", "profiler", "lightning_module", "train_dataloader"):
        assert getattr(other, shared) is getattr(fit, shared)


@pytest.mark.parametrize(
    ("method", "starts"), [("popen", False), ("fork", True), ("spawn", True)]
)
def test_which_strategies_start_processes(method: Any, starts: bool) -> None:
    assert _compat.starts_processes_for_fit(DDPStrategy(start_method=method)) is starts
    assert not _compat.starts_processes_for_fit(trainer().strategy)


def test_a_loader_takes_another_size() -> None:
    loader = DataLoader(rows(10), 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="should not be set after"):
        loader.batch_size = 5  # type: ignore[misc]  # why the function is there
    _compat.write_batch_size(loader, 5)
    assert (loader.batch_size, len(loader)) == (5, 2)
    assert [len(x) for x, _ in loader] == [5, 5]


@pytest.mark.parametrize(
    ("step", "takes_index"),
    [
        (lambda self, batch: None, False),
        (lambda self, batch, batch_idx: None, True),
        (lambda self, batch, index: None, True),
        (lambda self, *args: None, True),
        (lambda self, batch, *, scale=1.0, **how: None, False),
    ],
)
def test_arguments_of_a_step_are_lightnings(step: Any, takes_index: bool) -> None:
    received: list[int] = []

    @functools.wraps(step)
    def training_step(self: Any, *args: Any) -> Any:
        step(self, *args)
        received.append(len(args))
        return Net.training_step(self, args[0], 0)

    module = type("Stepping", (Net,), {"training_step": training_step})()
    trainer(max_steps=1).fit(module, Data())
    assert received == [1 + takes_index]
    assert _compat.step_arguments(module, "batch", 3) == ("batch", 3)[: received[0]]


@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_a_quiet_trainer_stands_where_another_is_and_leaves_signals_alone() -> None:
    class Small(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.seen: list[tuple[int, int, int]] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            at = self.trainer.current_epoch, self.trainer.global_step
            self.seen.append((*at, self.trainer.global_rank))
            return self.layer(batch).sum()

        def configure_optimizers(self) -> Any:
            assert self.trainer.estimated_stepping_batches == 20
            return torch.optim.SGD(self.parameters(), lr=0.1)

    handlers: list[Any] = []

    def beside(trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 2 and not handlers:
            handlers.append(signal.getsignal(signal.SIGTERM))
            quiet = _compat.quiet_trainer(trainer, callbacks=[])
            _compat.stand_where(quiet, trainer)
            other = Small()
            quiet.fit(other, DataLoader(torch.ones(1, 1)))  # type: ignore[arg-type]
            handlers.append(signal.getsignal(signal.SIGTERM))
            assert other.seen[0] == (2, 8, 0)
            assert pl_module.trainer is trainer

    live = trainer(
        max_epochs=5, callbacks=[LambdaCallback(on_train_epoch_start=beside)]
    )
    live.fit(Small(), DataLoader(torch.ones(4, 1)))  # type: ignore[arg-type]
    assert handlers[0] is handlers[1]
    assert live.global_step == 20


def test_a_quiet_trainer_has_no_callbacks_of_installed_packages(
    tmp_path: Path, monkeypatch: Any
) -> None:
    about = tmp_path / "adding-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: adding\nVersion: 1.0")
    group = "lightning.pytorch.callbacks_factory"
    (about / "entry_points.txt").write_text(f"[{group}]\nit = adding:make\n")
    code = "from lightning.pytorch import Callback\nmake = lambda: [Callback()]\n"
    (tmp_path / "adding.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)

    def number(trainer: Any) -> int:
        return [type(each) for each in trainer.callbacks].count(Callback)

    live = trainer()
    assert number(live) == 1
    assert number(_compat.quiet_trainer(live, callbacks=[])) == 0
