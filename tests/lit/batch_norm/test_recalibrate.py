"""Statistics are those of the data whenever they are used or kept."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from torch import Tensor

from tests.core.batch_norm.nets import furthest, of_big_batch, statistics
from tests.helpers import (
    raise_rank_errors,
    run_ranks,
    trainer,
)
from tests.lit.batch_norm.fits import (
    FEW,
    At,
    ConvModule,
    Validated,
    batches,
    count_passes,
    dataset,
    fit,
    others,
    reference,
    running,
)
from trainkit import AccumulationMixin, BatchNormGuard, PerSample
from trainkit.errors import TrainkitError

pytestmark = [
    pytest.mark.filterwarnings("ignore:accumulation. an open window"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
]

EXACT = 1e-10


# ---- when ----------------------------------------------------------------------------


def test_statistics_at_the_end_equal_all_rows_as_one_batch() -> None:
    module = fit("recalibrate", data=batches(shuffle=True))
    assert furthest(statistics(module.net), reference(module)) <= EXACT


@pytest.mark.parametrize("exact", [True, False])
def test_plain_running_statistics_do_not_equal_them(exact: bool) -> None:
    """The negative control; exact gradients change nothing about it."""
    module = fit(exact=exact)
    assert furthest(statistics(module.net), reference(module)) > 1e-2


def test_one_pass_equals_in_the_first_layer_only() -> None:
    module = fit(BatchNormGuard("recalibrate", exact=False))
    found, wanted = statistics(module.net), reference(module)
    for key in ("running_mean", "running_var"):
        off = {n: (found[n] - wanted[n]).abs().max() for n in found if key in n}
        assert off[f"bn1.{key}"] <= EXACT
        assert off[f"bn3.{key}"] > 1e-3


@pytest.mark.parametrize("how", [{}, {"val_check_interval": 2}])
def test_every_validation_sees_statistics_of_its_time(how: Any) -> None:
    off: list[float] = []

    def look(trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            off.append(furthest(statistics(module.net), reference(module, rows)))

    rows = dataset(FEW).tensors[0]
    hook, val = At("on_validation_epoch_start", look), batches(batch_size=27)
    data = batches(FEW)
    fit("recalibrate", hook, module=Validated(), data=data, val=val, **how)
    assert len(off) == (4 if how else 2)
    assert max(off) <= EXACT


def test_nothing_runs_while_sanity_checking_nor_twice_for_one_step(
    monkeypatch: Any, tmp_path: Path
) -> None:
    """A validation, two checkpoints and the end of training fall on one step."""
    passes = count_passes(monkeypatch)
    saving = [
        ModelCheckpoint(tmp_path / "a", save_last=True, every_n_epochs=1),
        ModelCheckpoint(tmp_path / "b", save_weights_only=True, every_n_train_steps=3),
    ]
    how = {"num_sanity_val_steps": 2, "enable_checkpointing": True}
    fit("recalibrate", *saving, module=Validated(), val=batches(), **how)
    # To learn the order, and for each of three layers.
    assert passes == [3] * 4 + [6] * 4


# ---- what is as before ---------------------------------------------------------------


class Draws(torch.nn.Module):
    """Random numbers of three kinds in the data, as augmentation takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.data = dataset(FEW)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        noise = float(torch.rand(())) + random.random() + float(np.random.rand())
        return x + noise, y


MOVES = pytest.mark.filterwarnings("ignore:training_step has changed queue:UserWarning")


class Busy(AccumulationMixin, ConvModule):
    """Logs, draws, and keeps a state that its forward pass moves."""

    accumulation = PerSample()

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(3, dtype=torch.float64))
        self.seen: list[Any] = []
        self.stages: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.stages.append((self.training, self.trainer.training))
        x = torch.nn.functional.dropout(batch[0], 0.2, self.training)
        loss = super().training_step((x, batch[1]), batch_idx)
        self.queue += x.mean()
        self.queue = self.queue.roll(1)
        self.log_dict({"a": loss, "b": 2 * loss})
        self.log_exact("exact", loss, batch)
        if torch.is_grad_enabled():
            self.seen.append(batch[0].sum().item())
        return loss


class BusyValidated(Busy, Validated): ...


def busy(policy: Any, *more: Any, **options: Any) -> tuple[Any, dict[str, float]]:
    logged: dict[str, float] = {}

    def note(trainer: Any, module: Any) -> None:
        for name, value in trainer.callback_metrics.items():
            if "val" not in name:
                logged[f"{trainer.current_epoch} {name}"] = float(value)

    look = At("on_train_epoch_end", note)
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)
    module = BusyValidated()
    workers = options.pop("workers", {})
    loader = torch.utils.data.DataLoader(
        Draws(),  # type: ignore[arg-type]
        batch_size=4,
        shuffle=True,
        **workers,
    )
    options = {"val_check_interval": 2, "max_epochs": 2, **options}
    fit(
        policy,
        look,
        *more,
        module=module,
        data=loader,
        val=batches(batch_size=27),
        exact=False,
        **options,
    )
    return module, logged


WORKERS: list[Any] = [
    {},
    {"num_workers": 1},
    {"num_workers": 1, "persistent_workers": True},
]


@MOVES
@pytest.mark.parametrize("workers", WORKERS)
def test_training_goes_on_bit_by_bit_as_without_the_guard(workers: Any) -> None:
    """Order of the data, augmentation, dropout, logs, buffers: all but statistics."""
    how: Any = {}
    if workers:  # each validation starts workers for each layer
        epochs = 2 if "persistent_workers" in workers else 1
        how = {"val_check_interval": 4, "workers": workers, "max_epochs": epochs}
    (module, logged), (plain, wanted) = (
        busy(policy, **how) for policy in ("recalibrate", "ignore")
    )
    assert module.seen == plain.seen
    assert logged == wanted
    assert f"{how.get('max_epochs', 2) - 1} exact" in logged
    for name, tensor in others(plain).items():
        assert torch.equal(module.state_dict()[name], tensor), name
    assert furthest(statistics(module.net), statistics(plain.net)) > 1e-3
    assert set(module.stages) == {(True, True)}


@MOVES
def test_every_pass_sees_the_same_augmented_rows() -> None:
    """Each ends at another layer, and has drawn more or fewer numbers on the way."""
    rows: dict[int, list[float]] = {}

    class Looks(Busy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if not torch.is_grad_enabled():
                rows.setdefault(batch_idx, []).append(batch[0].sum().item())
            return super().training_step(batch, batch_idx)

    def draw(*_: Any) -> None:
        torch.rand(3)
        random.random()
        np.random.rand()

    torch.manual_seed(1)
    data = torch.utils.data.DataLoader(Draws(), batch_size=4, shuffle=True)  # type: ignore[arg-type]
    module = Looks()
    module.net.conv2.register_forward_pre_hook(draw)  # not in the first pass
    fit("recalibrate", module=module, data=data, exact=False)
    assert len(rows) == 4
    for batch_idx, seen in rows.items():
        assert len(seen) >= 3 * (batch_idx > 0)
        assert len(set(seen)) == 1


def test_checkpoint_in_mid_window_changes_nothing_else(tmp_path: Path) -> None:
    """The window's gradients, saved and not saved, are as they were."""

    def save(trainer: Any, module: Any) -> None:
        before = [p.grad.clone() for p in module.net.parameters() if p.grad is not None]
        modes = [m.training for m in module.modules()]
        trainer.save_checkpoint(tmp_path / "one.ckpt")
        after = [p.grad for p in module.net.parameters() if p.grad is not None]
        assert len(before) == len(after) > 0
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert modes == [m.training for m in module.modules()]
        state = torch.load(tmp_path / "one.ckpt", weights_only=True)["state_dict"]
        assert furthest(running(state), reference(module)) <= EXACT

    def in_mid_window(trainer: Any, module: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx in (0, 3, 4):
            save(trainer, module)

    saved = fit("recalibrate", At("on_train_batch_end", in_mid_window), max_epochs=1)
    plain = fit("recalibrate", max_epochs=1)
    assert all(map(torch.equal, saved.parameters(), plain.parameters()))


def test_numbers_of_batches_stay() -> None:
    module = fit("recalibrate")
    assert module.net.bn1.num_batches_tracked == 14


def test_forward_pass_that_raises_leaves_all_as_it_was() -> None:
    class Breaks(Validated):
        broken = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if not torch.is_grad_enabled() and batch_idx == 3:
                raise KeyError("a user's mistake")
            return loss

    module, before = Breaks(), {}
    note = At("on_train_batch_end", lambda t, m: before.update(statistics(m.net)))
    guard = BatchNormGuard(
        "recalibrate", forward=lambda m, batch: explode(m.net(batch[0]))
    )
    with pytest.raises(KeyError, match="a user's mistake"):
        fit(guard, note, module=module, val=batches())
    assert furthest(statistics(module.net), before) == 0
    assert "log" not in vars(module)


def explode(y: Tensor) -> None:
    raise KeyError("a user's mistake")


# ---- several ranks -------------------------------------------------------------------


def on_rank(rank: int, world: int, sampler: bool) -> tuple[float, dict[str, Tensor]]:
    rows = dataset(28)
    data = rows
    if not sampler:  # each rank has rows of its own
        data = torch.utils.data.TensorDataset(*(t[rank::world] for t in rows.tensors))
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=sampler)
    module = ConvModule()
    guard = BatchNormGuard("recalibrate")
    trainer(
        2,
        strategy="ddp",
        devices=world,
        use_distributed_sampler=sampler,
        callbacks=[guard],
    ).fit(module, loader)
    wanted = of_big_batch(module.net, rows.tensors[0])
    return furthest(statistics(module.net), wanted), statistics(module.net)


def by_both(rank: int, world: int) -> list[tuple[float, dict[str, Tensor]]]:
    return [on_rank(rank, world, sampler) for sampler in (True, False)]


def test_ranks_equal_all_rows_as_one_batch() -> None:
    """With a distributed sampler, and where each rank has rows of its own."""
    ends = raise_rank_errors(run_ranks(by_both, 2))
    for found in zip(*ends, strict=True):
        assert max(off for off, _ in found) <= EXACT
        assert furthest(found[1][1], found[0][1]) == 0


# ---- refusals ------------------------------------------------------------------------


class Manual(ConvModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def test_manual_optimization_is_refused_without_a_forward() -> None:
    match = r"Manual steps its optimizers itself.*forward=lambda module, batch"
    with pytest.raises(TrainkitError, match=match):
        fit("recalibrate", module=Manual(), exact=False, accumulate=1)


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
def test_step_that_fetches_its_batches_is_refused() -> None:
    class Fetches(ConvModule):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            raise AssertionError

    with pytest.raises(TrainkitError, match="Fetches fetches its own batches"):
        fit("recalibrate", module=Fetches(), exact=False)


def test_data_that_can_be_read_once_are_refused() -> None:
    once = (batch for batch in batches())
    with pytest.raises(TrainkitError, match="are a generator, which can be read only"):
        fit("recalibrate", data=once, max_epochs=1)


@pytest.mark.filterwarnings("ignore:Swapping scheduler")
def test_averaged_weights_end_with_the_statistics_of_all_rows() -> None:
    """StochasticWeightAveraging's own last epoch is a mean of micro-batches."""
    ends = []
    for policy in ("recalibrate", "ignore"):
        averaging = StochasticWeightAveraging(0.05, swa_epoch_start=2)
        module = fit(policy, averaging, max_epochs=4)
        ends.append(module)
        off = furthest(statistics(module.net), reference(module))
        assert (off <= EXACT) is (policy == "recalibrate")
    assert all(map(torch.equal, ends[0].parameters(), ends[1].parameters()))
