"""Statistics are those of the data whenever they are used or kept, and nothing else is
another one."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from tests.helpers import raise_rank_errors, run_cases, trainer
from tests.lit.batch_norm.fits import (
    FEW,
    At,
    ConvModule,
    Manual,
    Validated,
    batches,
    dataset,
    fit,
    reference,
)
from tests.zoo.small_resnet import furthest, of_big_batch, statistics
from trainkit import AccumulationMixin, BatchNormGuard, PerSample
from trainkit.errors import TrainkitError

pytestmark = [
    pytest.mark.filterwarnings("ignore:accumulation. an open window"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
]

EXACT = 1e-10


def running(state: dict[str, Tensor], prefix: str = "net.") -> dict[str, Tensor]:
    """The running statistics in a state dict."""
    return {
        key.removeprefix(prefix): tensor.clone()
        for key, tensor in state.items()
        if "running_" in key
    }


def others(module: Any) -> dict[str, Tensor]:
    """All of the state but the running statistics."""
    state = module.state_dict()
    return {k: v.clone() for k, v in state.items() if "running_" not in k}


def count_passes(monkeypatch: Any) -> list[int]:
    steps: list[int] = []
    real = ConvModule.training_step

    def counted(self: Any, batch: Any, batch_idx: int) -> Any:
        if not torch.is_grad_enabled() and batch_idx == 0:
            steps.append(self.trainer.global_step)
        return real(self, batch, batch_idx)

    monkeypatch.setattr(ConvModule, "training_step", counted)
    return steps


# ---- when ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Swapping scheduler")
@pytest.mark.parametrize("averages", [False, True])
def test_statistics_at_the_end_equal_all_rows_as_one_batch(averages: bool) -> None:
    """The control is another policy; exact gradients change nothing about it. The last
    epoch of StochasticWeightAveraging is a mean of micro-batches."""
    ends = []
    for policy in ("recalibrate", "ignore"):
        swa = [StochasticWeightAveraging(0.05, swa_epoch_start=2)] * averages
        how: Any = {"max_epochs": 4 if averages else 2, "exact": not averages}
        module = fit(policy, *swa, data=batches(shuffle=not averages), **how)
        ends.append(module)
        off = furthest(statistics(module.net), reference(module))
        assert off <= EXACT if policy == "recalibrate" else off > 1e-3
        if not averages:
            assert module.net.bn1.num_batches_tracked == 14
    if averages:
        assert all(map(torch.equal, ends[0].parameters(), ends[1].parameters()))


def test_one_pass_equals_in_the_first_layer_only() -> None:
    module = fit(BatchNormGuard("recalibrate", exact=False))
    found, wanted = statistics(module.net), reference(module)
    off = {n: (found[n] - wanted[n]).abs().max() for n in found if "var" in n}
    assert off["bn1.running_var"] <= EXACT
    assert off["bn3.running_var"] > 1e-3


@pytest.mark.parametrize("how", [{}, {"val_check_interval": 2}])
def test_every_validation_sees_statistics_of_its_time(how: Any) -> None:
    off: list[float] = []

    def look(trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            off.append(furthest(statistics(module.net), reference(module, rows)))

    rows = dataset(FEW).tensors[0]
    hook = At("on_validation_epoch_start", look)
    how = {"data": batches(FEW), "val": batches(batch_size=27), **how}
    fit("recalibrate", hook, module=Validated(), **how)
    assert len(off) == (4 if "val_check_interval" in how else 2)
    assert max(off) <= EXACT


def test_nothing_runs_while_sanity_checking_nor_twice_for_one_step(
    monkeypatch: Any, tmp_path: Path
) -> None:
    """A validation, two checkpoints and the end of training fall on one step."""
    passes = count_passes(monkeypatch)
    saving = [
        ModelCheckpoint(tmp_path / "a", save_last=True, every_n_epochs=1),
        ModelCheckpoint(tmp_path / "b", every_n_train_steps=3),
    ]
    how = {"num_sanity_val_steps": 2, "enable_checkpointing": True}
    fit("recalibrate", *saving, module=Validated(), val=batches(), **how)
    assert passes == [3] * 3 + [6] * 3  # three layers follow each other


CHECKPOINTS: dict[str, tuple[dict[str, Any], bool]] = {
    # options, and whether it validates
    "every second step": ({"every_n_train_steps": 2, "save_top_k": -1}, True),
    "last": ({"save_last": True}, True),
    "its end": ({"save_on_train_epoch_end": True, "save_top_k": -1}, False),
    "monitored": ({"monitor": "val"}, True),
}


@pytest.mark.parametrize(
    ("policy", "name"),
    [*(("recalibrate", name) for name in CHECKPOINTS), (None, "last")],
)
def test_checkpoints_hold_the_statistics_of_their_own_weights(
    tmp_path: Path, policy: Any, name: str
) -> None:
    """Those of plain Lightning, the control, do not."""
    options, validates = CHECKPOINTS[name]
    saving = ModelCheckpoint(tmp_path, **options)
    module = Validated() if validates else ConvModule()
    val = batches(batch_size=27) if validates else None
    fit(policy, saving, module=module, val=val, enable_checkpointing=True)
    paths = list(tmp_path.glob("*.ckpt"))
    assert paths
    for path in paths:
        twin = ConvModule()
        twin.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
        off = furthest(statistics(twin.net), reference(twin))
        assert off <= EXACT if policy else off > 1e-2


def test_checkpoint_on_an_error_is_written_as_is(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Who knows what still works then: nothing more is computed."""

    def fail(trainer: Any, module: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == 4:
            raise KeyError("a user's mistake")

    passes = count_passes(monkeypatch)
    saving = ModelCheckpoint(tmp_path, save_on_exception=True)
    failing = At("on_train_batch_end", fail)
    with pytest.raises(KeyError, match="a user's mistake"):
        fit("recalibrate", failing, saving, enable_checkpointing=True)
    assert len(list(tmp_path.glob("*.ckpt"))) == 1
    assert passes == []


# ---- what is as before ---------------------------------------------------------------


class Draws:
    """Random numbers of three kinds in the data, as augmentation takes them."""

    def __len__(self) -> int:
        return FEW

    def __getitem__(self, index: int) -> Any:
        x, y = dataset(FEW)[index]
        noise = float(torch.rand(())) + random.random() + float(np.random.rand())
        return x + noise, y


class Busy(AccumulationMixin, Validated):
    """Logs, draws, measures, and keeps a state that its forward pass moves."""

    accumulation = PerSample()
    proof = "off"

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(3, dtype=torch.float64))
        self.seen: list[Any] = []
        # In an object of its own, which is not put back.
        self.notes = SimpleNamespace(passes={}, stages=[])
        self.rows, self.mean = SumMetric(), MeanMetric()
        self.table = nn.ModuleDict({"a": nn.ModuleList([SumMetric()])})
        self.both = MetricCollection({"accuracy": MulticlassAccuracy(3)})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.notes.stages.append((self.training, self.trainer.training))
        x = torch.nn.functional.dropout(batch[0], 0.2, self.training)
        loss = super().training_step((x, batch[1]), batch_idx)
        self.queue += x.mean()
        self.queue = self.queue.roll(1)
        self.log_dict({"a": loss, "b": 2 * loss})
        self.log_exact("exact", loss, batch)
        table: Any = self.table
        for metric in (self.rows, table["a"][0]):
            metric.update(len(x))
        self.both.update(self.net(x), batch[1])
        self.mean(loss)
        self.log("mean", self.mean, on_epoch=True, on_step=False)
        self.seen.append(batch[0].sum().item())
        if not torch.is_grad_enabled():
            self.notes.passes.setdefault(batch_idx, []).append(self.seen[-1])
        return loss


def busy(policy: Any, **options: Any) -> tuple[Any, dict[str, float]]:
    logged: dict[str, float] = {}

    def note(trainer: Any, module: Any) -> None:
        for name, value in trainer.callback_metrics.items():
            if "val" not in name:
                logged[f"{trainer.current_epoch} {name}"] = float(value)

    look = At("on_train_epoch_end", note)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(11)
    module, val = Busy(), batches(batch_size=27)
    data = DataLoader(Draws(), batch_size=4, shuffle=True)  # type: ignore[arg-type]
    how: Any = {"val_check_interval": 2, "val": val}
    fit(policy, look, module=module, data=data, **how)
    return module, logged


@pytest.mark.filterwarnings("ignore:training_step has changed queue:UserWarning")
def test_training_goes_on_bit_by_bit_as_without_the_guard() -> None:
    """Order of the data, augmentation, dropout, logs, metrics, buffers, lists: all but
    statistics. Every pass sees the same augmented rows."""
    (module, logged), (plain, wanted) = map(busy, ("recalibrate", "ignore"))
    assert module.seen == plain.seen
    assert logged == wanted
    assert {"1 exact", "1 mean"} <= logged.keys()
    for name, tensor in others(plain).items():
        assert torch.equal(module.state_dict()[name], tensor), name
    assert furthest(statistics(module.net), statistics(plain.net)) > 1e-3
    assert set(module.notes.stages) == {(True, True)}
    for each in (module, plain):
        table: Any = each.table
        assert [m.compute() for m in (each.rows, table["a"][0])] == [2 * FEW] * 2
    assert module.both.compute() == plain.both.compute()
    assert len(module.notes.passes) == 4
    passes = [seen[:3] for seen in module.notes.passes.values()]
    assert all(len(seen) == 3 and len(set(seen)) == 1 for seen in passes)


def test_checkpoint_in_mid_window_changes_nothing_else(tmp_path: Path) -> None:
    """The window's gradients, saved and not saved, are as they were."""

    def save(trainer: Any, module: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx not in (0, 3, 4):
            return
        before = [p.grad.clone() for p in module.net.parameters() if p.grad is not None]
        modes = [m.training for m in module.modules()]
        trainer.save_checkpoint(tmp_path / "one.ckpt")
        after = [p.grad for p in module.net.parameters() if p.grad is not None]
        assert len(before) == len(after) > 0
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert modes == [m.training for m in module.modules()]
        state = torch.load(tmp_path / "one.ckpt", weights_only=True)["state_dict"]
        assert furthest(running(state), reference(module)) <= EXACT

    how: Any = {"max_epochs": 1, "exact": True}
    saved = fit("recalibrate", At("on_train_batch_end", save), **how)
    plain = fit("recalibrate", **how)
    assert all(map(torch.equal, saved.parameters(), plain.parameters()))


def test_forward_pass_that_raises_leaves_all_as_it_was() -> None:
    calls = itertools.count(1)

    class Explodes(Validated):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            # In the second pass: the first layers have new statistics.
            if not torch.is_grad_enabled() and next(calls) > 10:
                raise KeyError("a user's mistake")
            return loss

    module, before = Explodes(), dict[str, Tensor]()
    note = At("on_train_batch_end", lambda t, m: before.update(statistics(m.net)))
    with pytest.raises(KeyError, match="a user's mistake"):
        fit("recalibrate", note, module=module, val=batches())
    assert furthest(statistics(module.net), before) == 0
    assert "log" not in vars(module)


# ---- several ranks -------------------------------------------------------------------


def on_rank(rank: int, world: int, sampler: bool) -> tuple[float, dict[str, Tensor]]:
    rows = dataset(28)
    own = TensorDataset(*(t[rank::world] for t in rows.tensors))
    loader = DataLoader(rows if sampler else own, batch_size=4, shuffle=sampler)
    module, guards = ConvModule(), [BatchNormGuard("recalibrate")]
    ddp: Any = {"strategy": "ddp", "devices": world, "callbacks": guards}
    trainer(2, use_distributed_sampler=sampler, **ddp).fit(module, loader)
    wanted = of_big_batch(module.net, rows.tensors[0])
    return furthest(statistics(module.net), wanted), statistics(module.net)


def test_ranks_equal_all_rows_as_one_batch() -> None:
    """With a distributed sampler, and where each rank has rows of its own."""
    ends = run_cases(2, {sampler: (on_rank, sampler) for sampler in (True, False)})
    for found in map(raise_rank_errors, ends.values()):
        assert max(off for off, _ in found) <= EXACT
        assert furthest(found[1][1], found[0][1]) == 0


# ---- refusals ------------------------------------------------------------------------


REFUSED: dict[str, tuple[Any, str]] = {
    "manual": (
        lambda: {"module": Manual(), "accumulate": 1},
        r"ConvModule steps its optimizers itself.*Take 'momentum'",
    ),
    "once": (
        lambda: {"data": (batch for batch in batches()), "max_epochs": 1},
        "are a generator, which can be read only",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_run_once_more_is_refused(name: str) -> None:
    how, words = REFUSED[name]
    with pytest.raises(TrainkitError, match=words):
        fit("recalibrate", **how())
