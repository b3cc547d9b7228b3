"""`find_micro_batch` changes two numbers, on all ranks, and leaves everything else."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor

from tests.cli.training import SMALL
from tests.helpers import RankError, raise_rank_errors, run_cases, run_ranks, weights
from tests.lit.probe.finding import (
    MAKERS,
    TARGET,
    Data,
    Limited,
    Net,
    exact,
    found,
    limited,
    quick,
)
from tests.startup import forked
from tests.zoo.modules import hooked, scaled
from trainkit.lit.batch_size import micro_batch_of

pytestmark = pytest.mark.filterwarnings("ignore:.*IterableDataset.*")


def trained(fit: pl.Trainer, module: pl.LightningModule, data: Any) -> Any:
    fit.fit(module, data)
    states = [weights(module), *(b.double().flatten() for b in module.buffers())]
    return torch.cat([each.flatten() for each in states])


def read_size(data: Any) -> Any:
    is_module = isinstance(data, pl.LightningDataModule)
    return micro_batch_of(data.train_dataloader() if is_module else data)


# ---- training after it ---------------------------------------------------------------


@pytest.mark.parametrize("where", list(MAKERS))
def test_fit_after_it_equals_fit_with_the_sizes_written_by_hand(where: str) -> None:
    make = MAKERS[where]
    torch.manual_seed(11)
    fit, module, data = quick(callbacks=[exact()]), Net(), make(4)
    plan = found(module, data, fit, max_micro_batch=16).plan
    assert (plan.effective, plan.exact) == (TARGET, True)
    assert read_size(data) == plan.micro_batch
    assert fit.accumulate_grad_batches == plan.accumulate
    after = trained(fit, module, data)

    torch.manual_seed(11)
    by_hand = quick(plan.accumulate, callbacks=[exact()])
    reference = trained(by_hand, Net(), make(plan.micro_batch))
    assert torch.equal(after, reference)
    assert fit.global_step == by_hand.global_step == 2 * 96 // TARGET

    torch.manual_seed(12)  # the comparison sees dropout's and the order's numbers
    other = trained(quick(plan.accumulate), Net(), make(plan.micro_batch))
    assert not torch.equal(after, other)


def test_it_can_be_asked_twice() -> None:
    fit, module, data = quick(), limited(rows=9), Data()
    first, second = found(module, data, fit), found(module, data, fit)
    assert first.plan.micro_batch <= 8
    assert read_size(data) == second.plan.micro_batch


def test_it_can_be_asked_between_two_fits() -> None:
    """Progress stays where the first fit left it: the second goes on from there. What
    that has logged holds a metric that hangs on a graph, which has no copy."""

    class Measured(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.mean.last = loss = super().training_step(batch, batch_idx)
            self.log("mean", self.mean, on_step=False, on_epoch=True)
            return loss

    def run(*, asks: bool) -> tuple[Any, int, int]:
        torch.manual_seed(4)
        fit, module, data = quick(max_epochs=1), Measured(), Data(8)
        fit.fit(module, data)
        if asks:
            fit.fit_loop.max_epochs = 2
            found(module, data, fit, target=8, max_micro_batch=8)
            assert (fit.current_epoch, fit.global_step) == (1, 12)
            data.batch_size, fit.accumulate_grad_batches = 8, 1
        fit.fit_loop.max_epochs = 2
        return trained(fit, module, data), fit.global_step, fit.current_epoch

    asked, plain = run(asks=True), run(asks=False)
    assert torch.equal(asked[0], plain[0])
    assert asked[1:] == plain[1:] == (24, 2)


# ---- what is put back ----------------------------------------------------------------


def kept(fit: Any, module: Net) -> dict[str, Any]:
    """All that a fit could change, by value."""
    loop = fit.fit_loop
    return {
        "weights": copy.deepcopy(module.state_dict()),
        "gradients": [p.grad for p in module.parameters()],
        "metric": float(module.mean.mean_value), "updates": module.mean.update_count,
        "attributes": (module.num_rows, list(module.sizes), sorted(vars(module))),
        "callbacks": list(fit.callbacks),
        "loggers": list(fit.loggers),
        "optimizers": list(fit.optimizers),
        "progress": copy.deepcopy(loop.state_dict()),
        "flags": (loop.restarting, fit.should_stop, fit.limit_val_batches),
        "sanity": fit.num_sanity_val_steps,
        "logged": dict(fit.callback_metrics),
        "state": copy.deepcopy(fit.state),
        "profiler": fit.profiler,
        "training": module.training,
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False)["state"]["key"].tolist(),
    }  # fmt: skip


@pytest.mark.parametrize("how", ["finds", "fails"])
def test_everything_else_is_as_it_was(how: str, tmp_path: Path) -> None:
    class Validated(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise AssertionError("validation has no part in it")

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            random.random()
            np.random.rand()
            if how == "fails" and len(batch[0]) > 8:
                raise KeyError("a mistake of the user's")
            return super().training_step(batch, batch_idx)

    class Both(Data):
        def val_dataloader(self) -> Any:
            return self.train_dataloader()

    module, data = Validated(), Both()
    first = next(module.parameters())
    first.grad = torch.ones_like(first)
    options: Any = {"enable_checkpointing": True, "limit_val_batches": 3}
    options |= {"callbacks": [ModelCheckpoint(tmp_path), pl.Callback()]}
    fit = quick(logger=CSVLogger(tmp_path), **options)
    before = kept(fit, module)
    if how == "fails":
        with pytest.raises(KeyError, match="a mistake of the user's"):
            found(module, data, fit)
        assert (data.batch_size, fit.accumulate_grad_batches) == (4, 1)
    else:
        found(module, data, fit)
    after = kept(fit, module)
    torch.testing.assert_close(after.pop("torch"), before.pop("torch"), rtol=0, atol=0)
    for name in ("weights", "gradients"):
        torch.testing.assert_close(after.pop(name), before.pop(name), rtol=0, atol=0)
    assert after == before
    assert data.num_setups == 0
    assert list(tmp_path.iterdir()) == []


def test_callbacks_and_loggers_see_nothing() -> None:
    class Calls:
        """Each hook says that it was called."""

        def __init__(self) -> None:
            self.called: list[str] = []

        def __getattribute__(self, name: str) -> Any:
            if name.startswith("on_") or name in ("setup", "teardown"):
                self.called.append(name)
            return super().__getattribute__(name)

    class Watching(Calls, pl.Callback): ...

    class Brought(Calls, pl.Callback): ...  # of the same type it would replace it

    class Bringing(Net):
        def configure_callbacks(self) -> Any:
            return [brought]

    watching, brought = Watching(), Brought()
    fit, data = quick(callbacks=[watching]), Data()
    watching.called.clear()
    module = Bringing()
    found(module, data, fit)
    assert watching.called == brought.called == []
    fit.fit(module, data)
    assert "on_train_batch_end" in watching.called
    assert "on_train_batch_end" in brought.called


def test_what_setup_makes_is_made_anew() -> None:
    """A module that is built in `setup`, if it is not there yet, is not left trained,
    and draws in `fit` what it would have drawn."""

    class Late(Net):
        def setup(self, stage: str) -> None:
            if not hasattr(self, "head"):
                self.head = torch.nn.Linear(1, 1).double()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) + self.head.weight.sum() ** 2

    torch.manual_seed(6)
    fit, module, data = quick(), Late(), Data()
    plan = found(module, data, fit).plan
    assert not hasattr(module, "head")
    after = trained(fit, module, data)
    torch.manual_seed(6)
    by_hand = trained(quick(plan.accumulate), Late(), Data(plan.micro_batch))
    assert torch.equal(after, by_hand)


def test_a_scaler_is_put_back_and_its_optimizer_has_stepped() -> None:
    """Its first steps are skipped, with which no state of the optimizer is made."""

    class Half(Net):
        states: list[int] = []

        def __init__(self) -> None:
            super().__init__()
            self.float()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.states.append(len(self.trainer.optimizers[0].state))
            x, y = batch
            return self.net(x.float()).squeeze(1).sub(y.float()).square().mean() * 1e4

    plugin = scaled(2.0**30)["plugins"]
    before = plugin.scaler.state_dict()
    found(Half(), Data(), quick(plugins=plugin), target=4)
    assert Half.states[0] == 0
    assert Half.states[1] > 0, "the size fits beside the optimizer's state"
    assert plugin.scaler.state_dict() == before


def test_only_a_copy_runs_and_the_module_is_on_the_host_meanwhile() -> None:
    """So that a size fits or not as if there were one of them."""
    ran: list[int] = []

    class Moved(Net):
        def cpu(self) -> Any:
            ran.append(id(self))
            return super().cpu()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            ran.append(id(self))
            return super().training_step(batch, batch_idx)

    module = Moved()
    found(module, Data())
    assert ran[0] == id(module)
    assert len(set(ran[1:])) == 1
    assert id(module) not in ran[1:]


def test_no_worker_is_left() -> None:
    before = set(multiprocessing.active_children())
    found(Net(), MAKERS["workers"](4))
    assert set(multiprocessing.active_children()) == before


# ---- ranks try each size together, agree on it, and are left alike -------------------


WORLD = 2


class OneLimited(Limited):
    """Only the last rank has little memory."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_rank != WORLD - 1:
            return Net.training_step(self, batch, batch_idx)
        return super().training_step(batch, batch_idx)


def one_limited(rows: int, where: str) -> OneLimited:
    return hooked(OneLimited, limit=rows, where=where, seen=[])()


def fitted(
    where: str, by_hand: tuple[int, int] | None = None
) -> tuple[int, int, Tensor, int]:
    """One rank's part: the sizes, the weights after a fit, the steps."""
    torch.manual_seed(3)
    fit = quick(strategy="ddp", devices=WORLD, callbacks=[exact()], max_epochs=1)
    module, data = one_limited(5, where), Data(4)
    if by_hand is not None:
        data.batch_size, fit.accumulate_grad_batches = by_hand
    else:
        found(module, data, fit, target=32)
    fit.fit(module, data)
    sizes = data.batch_size, fit.accumulate_grad_batches
    return *sizes, weights(module), fit.global_step


def finds_then_by_hand(rank: int, world: int, where: str) -> Any:
    first = fitted(where)
    return first, fitted(where, by_hand=(4, 4))


@pytest.fixture(scope="module")
def ends() -> dict[Any, list[Any]]:
    """What the ranks end with, where all of them fail or none."""
    places: Any = {w: (finds_then_by_hand, w) for w in ("forward", "backward")}
    return run_cases(WORLD, places | {words: (refused, words) for words in REFUSED})


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_one_rank_that_runs_out_decides_for_all(ends: Any, where: str) -> None:
    """In the backward pass its gradients would meet the other's in one bucket."""
    results = raise_rank_errors(ends[where])
    for (size, accumulate, after, steps), by_hand in results:
        assert (size, accumulate) == (4, 4), "4 x 4 x 2 ranks are the target"
        assert torch.equal(after, by_hand[2])
        assert steps == by_hand[3] == 3
    assert torch.equal(results[0][0][2], results[1][0][2])


def fails_on_one(rank: int, world: int) -> Any:
    class Mistaken(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if rank == 1:
                raise KeyError("labels")
            return super().training_step(batch, batch_idx)

    found(Mistaken(), Data(4), quick(strategy="ddp", devices=WORLD))


def test_another_error_on_one_rank_ends_all_of_them() -> None:
    first, second = run_ranks(fails_on_one, WORLD)
    assert isinstance(first, RankError)
    assert "another rank failed" in str(first)
    assert "KeyError: 'labels'" in str(second)


def synchronised() -> Net:
    module = Net()
    module.net[1] = torch.nn.SyncBatchNorm(8).double()
    return module


REFUSED: dict[str, tuple[Any, Any]] = {
    "on 2 ranks DDP with static_graph=True communicates": (
        *(Net, lambda: DDPStrategy(static_graph=True)),
    ),
    "SyncBatchNorm communicates within a pass": (synchronised, lambda: "ddp"),
    "on 2 ranks ModelParallelStrategy communicates": (Net, ModelParallelStrategy),
}


def refused(rank: int, world: int, words: str) -> Any:
    make, strategy = REFUSED[words]
    found(make(), Data(4), quick(strategy=strategy(), devices=WORLD))


@pytest.mark.parametrize("words", REFUSED)
def test_a_pass_that_communicates_is_refused(ends: Any, words: str) -> None:
    for result in ends[words]:
        assert words in str(result)


@pytest.mark.slow
def test_the_command_starts_its_ranks_and_one_speaks(tmp_path: Path) -> None:
    words = [
        *(sys.executable, "-m", "trainkit", "plan", "--probe", "--json"),
        *("--target", "16", "--max-micro-batch", "4", "trainer.precision=32-true"),
        *("trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", *SMALL),
    ]
    keep = {n: v for n, v in os.environ.items() if not n.startswith("WANDB")}
    how: Any = {"cwd": tmp_path, "env": {**keep, "HOME": str(tmp_path), **forked()}}
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, **how)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["world_size"], found["effective"]) == (2, 16)
    assert found["micro_batch"] <= 4
