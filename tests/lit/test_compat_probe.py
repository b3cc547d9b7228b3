"""What `find_micro_batch` needs of Lightning and torch that they do not document."""

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
from torch.utils.data import DataLoader

from tests.helpers import trainer as made
from tests.lit.probe.finding import Data, Net, quick, rows
from trainkit.lit._compat import (
    copied_trainer,
    leaves_fit,
    quiet_trainer,
    stand_where,
    starts_processes_for_fit,
    step_arguments,
    write_batch_size,
)


def leave(trainer: Any, *args: Any) -> None:
    raise leaves_fit(trainer)


def test_leaving_a_fit_tears_down_and_is_no_error() -> None:
    called: list[str] = []

    class Torn(Net):
        def teardown(self, stage: str) -> None:
            called.append(stage)

        def on_exception(self, exception: BaseException) -> None:
            called.append("exception")

    fit, module = quick(callbacks=[LambdaCallback(on_train_batch_start=leave)]), Torn()
    fit.fit(module, Data())
    assert called == ["fit"]
    assert module.sizes == []
    assert fit.state.finished


def test_a_copied_trainer_shares_what_is_not_lightnings() -> None:
    fit = quick(max_epochs=1, callbacks=[Callback()])
    fit.fit(Net(), Data())
    other = copied_trainer(fit)

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
    assert starts_processes_for_fit(DDPStrategy(start_method=method)) is starts
    assert not starts_processes_for_fit(quick().strategy)


def test_a_loader_takes_another_size() -> None:
    loader = DataLoader(rows(10), 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="should not be set after"):
        loader.batch_size = 5  # type: ignore[misc]  # why the function is there
    write_batch_size(loader, 5)
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
    quick(max_steps=1).fit(module, Data())
    assert received == [1 + takes_index]
    assert step_arguments(module, "batch", 3) == ("batch", 3)[: received[0]]


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
            quiet = quiet_trainer(trainer, callbacks=[])
            stand_where(quiet, trainer)
            other = Small()
            quiet.fit(other, DataLoader(torch.ones(1, 1)))  # type: ignore[arg-type]
            handlers.append(signal.getsignal(signal.SIGTERM))
            assert other.seen[0] == (2, 8, 0)
            assert pl_module.trainer is trainer

    live = made(max_epochs=5, callbacks=[LambdaCallback(on_train_epoch_start=beside)])
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

    live = quick()
    assert number(live) == 1
    assert number(quiet_trainer(live, callbacks=[])) == 0
