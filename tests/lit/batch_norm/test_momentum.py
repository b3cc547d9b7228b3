"""Running statistics forget as slowly as the big batch's, however windows are cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers import raise_rank_errors, run_ranks
from tests.lit.batch_norm.fits import (
    At,
    ConvModule,
    ConvNet,
    FromWhereItWas,
    dataset,
    fit,
)
from tests.lit.split.short_of_memory import Memory, starting_at
from tests.zoo.modules import by_hand
from tests.zoo.small_resnet import momenta
from trainkit import (
    AccumulationCallback,
    AccumulationMixin,
    AccumulationSchedule,
    BatchNormGuard,
    MicroBatching,
    PerSample,
)
from trainkit.lit.split import auto

pytestmark = [
    pytest.mark.filterwarnings("ignore:accumulation. an open window"),
    pytest.mark.filterwarnings("ignore:accumulate_grad_batches=.*has only"),
    pytest.mark.filterwarnings("ignore:Found 1 module"),
]

START = 1e6
"""A mean so far off that what is left of it is the product of all decays."""

SIZES = (4, 14, 17, 9, 2)
"""Rows of loader batches: by fours in 1, 4, 5, 3 and 1 micro-batches."""


class Still(ConvModule):
    """Does not learn, and every layer's input is zero: so the running mean moves by its
    momentum alone, and the decay is seen to the last digit."""

    proof = "off"

    def __init__(self, net: Any = ConvNet, fails: tuple[int, ...] = ()) -> None:
        super().__init__(net, lr=0.0)
        for layer in (self.net.conv1, self.net.conv2, self.net.flat):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        for layer in self.layers():
            layer.running_mean.fill_(START)
        # In an object of its own, which is not put back when a window is run again.
        self.memory = Memory(calls=fails)

    def layers(self) -> list[Any]:
        return [self.net.bn1, self.net.bn2, self.net.bn3]

    def left(self) -> list[float]:
        """What is left of the running means that training began with."""
        return [float(layer.running_mean.mean()) / START for layer in self.layers()]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.memory.need("forward", 0, len(batch[0]), len(batch[0]))
        return super().training_step(batch, batch_idx)


class MixedStill(AccumulationMixin, Still):
    accumulation = PerSample()


def synchronised() -> Still:
    return Still(lambda: nn.SyncBatchNorm.convert_sync_batchnorm(ConvNet()))


def of_sizes(sizes: tuple[int, ...]) -> DataLoader[Any]:
    """Batches of so many rows."""
    return DataLoader(dataset(60), batch_sampler=[list(range(n)) for n in sizes])


def split(sizes: tuple[int, ...] = SIZES, window: int = 1, **cut: Any) -> Any:
    """How split windows are trained."""
    options = MicroBatching(**(cut or {"size": 4}))
    callback = AccumulationCallback(PerSample(), micro_batching=options, proof="off")
    how = {"accumulate": window, "data": of_sizes(sizes)}
    return {**how, "more": [callback]}


def schedule(sizes: dict[int, int], unit: Any) -> Any:
    plan = AccumulationSchedule(sizes, unit=unit)
    return {"accumulate": 1, "more": [plan], "exact": True}


FORGETS: dict[str, tuple[int | None, float, dict[str, Any]]] = {
    # Steps (None: as many as were taken), momentum, and how it is trained. An epoch has
    # seven batches: most sizes leave a short last window, a step as well.
    "1": (14, 0.9, {"accumulate": 1}),
    "2": (8, 0.5, {"accumulate": 2, "exact": True}),
    "3": (6, 0.01, {}),
    "5": (4, 1.0, {"accumulate": 5}),
    "synchronised": (6, 0.1, {"module": synchronised}),
    "by epochs": (7, 0.1, schedule({0: 3, 1: 2}, "epoch")),
    "by steps": (6, 0.1, schedule({0: 1, 2: 4, 3: 5}, "step")),  # 1 1 4 1, then 5 2
    "back and forth": (None, 0.1, schedule({0: 2, 1: 3, 5: 1}, "step")),
    "1 of the epoch": (2, 0.1, {"limit_train_batches": 1}),
    "5 of the epoch": (4, 0.1, {"limit_train_batches": 5}),
    # Each forgets once a step, though in other shares: the first window too, one of one
    # part, and the short last one.
    "split": (10, 0.1, split()),
    "split, 2": (6, 0.1, split(SIZES[::-1], 2)),
    "split, 3": (4, 0.1, split((14, 2, 17, 9), 3)),
    # Windows that run out of memory are run again in smaller parts.
    "again": (10, 0.1, {**split(how="auto"), "fails": (1, 3)}),
    "again, 2": (6, 0.1, {**split(window=2, how="auto"), "fails": (1, 4)}),
}


@pytest.mark.parametrize("name", FORGETS)
def test_decay_equals_the_big_batchs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "SizeSearch", starting_at(1000))
    steps, momentum, how = FORGETS[name]
    how, taken = dict(how), list[int]()
    count = At("on_train_end", lambda t, m: taken.append(t.global_step))
    make, fails = how.pop("module", Still), how.pop("fails", ())
    module = make(fails=fails) if fails else make()
    for layer in module.layers():
        layer.momentum = momentum
    fit("momentum", count, module=module, **how)
    assert taken == [steps or taken[0]]
    assert bool(module.memory.num_failures) == bool(fails)
    assert module.left() == pytest.approx([(1 - momentum) ** taken[0]] * 3, abs=1e-12)
    assert set(momenta(module).values()) == {momentum}


@pytest.mark.parametrize("how", [{"exact": True}, {}, split()])
def test_decay_without_it_is_that_of_every_micro_batch(how: Any) -> None:
    """The negative control: giotto-deep#75, DeepLearningExamples#625."""
    module, updates = fit(None, module=Still(), **how), 28 if "more" in how else 14
    assert module.left() == pytest.approx([0.9**updates] * 3, abs=1e-12)


def on_rank(rank: int, world: int) -> list[float]:
    """Rank 0 runs more micro-batches than rank 1, or fewer."""
    how = split(((14, 3, 9), (3, 17, 2))[rank])
    how |= {"strategy": "ddp", "devices": world, "use_distributed_sampler": False}
    return fit("momentum", module=Still(), **how).left()


def test_forgetting_on_ranks_of_unlike_cuts() -> None:
    for left in raise_rank_errors(run_ranks(on_rank, 2)):
        assert left == pytest.approx([0.9**6] * 3, abs=1e-12)


def test_windows_by_hand_are_the_trainers() -> None:
    seen: list[float] = []
    note = At("on_train_batch_end", lambda t, m: seen.append(m.net.bn1.momentum))
    fit("momentum", note, module=by_hand(MixedStill)(), accumulate=2)
    assert seen[:6] == pytest.approx([1 - 0.9**0.5] * 6)
    assert seen[6] == pytest.approx(0.1)  # the short last window


@pytest.fixture(scope="module")
def saved(tmp_path_factory: Any) -> Path:
    """A checkpoint of each batch of one run's second epoch."""
    folder = tmp_path_factory.mktemp("saved")

    def save(trainer: Any, module: Any) -> None:
        batch = trainer.fit_loop.epoch_loop.total_batch_idx
        if batch > 6:
            trainer.save_checkpoint(folder / f"{batch}.ckpt")

    fit("momentum", At("on_train_batch_end", save), module=Still(), exact=True)
    return folder


@pytest.mark.parametrize("stop", [1, 3, 5, 7])
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended")
def test_decay_of_a_resumed_run_equals_an_unbroken_ones(saved: Path, stop: int) -> None:
    """In mid-window, at its end and at the epoch's."""
    path, module = saved / f"{6 + stop}.ckpt", Still()
    how = {"data": FromWhereItWas(stop), "ckpt_path": path, "exact": True}
    fit("momentum", module=module, **how)
    assert module.left() == pytest.approx([0.9**6] * 3, abs=1e-12)
    assert set(momenta(module.net).values()) == {0.1}


def test_layers_of_the_plain_mean_are_left_alone() -> None:
    def plain() -> ConvNet:
        net = ConvNet()
        net.bn2.momentum = None
        return net

    seen: list[Any] = []
    look = At("on_train_batch_end", lambda t, m: seen.append(momenta(m.net)))
    module = fit("momentum", look, module=ConvModule(plain))
    twin = fit(module=ConvModule(plain))
    assert {each["bn2"] for each in seen} == {None}
    epoch = [1 - 0.9 ** (1 / 3)] * 6 + [0.1]
    assert [each["bn1"] for each in seen] == pytest.approx(epoch * 2)
    assert torch.equal(module.net.bn2.running_mean, twin.net.bn2.running_mean)


@pytest.mark.parametrize("fails", [False, True])
def test_momentum_is_given_back_after_fit_or_an_error(fails: bool, capsys: Any) -> None:
    def end(trainer: Any, module: Any) -> None:
        if fails:
            assert set(momenta(module.net).values()) != {0.3, 0.1}
            raise KeyError("a user's mistake")

    module, guard = ConvModule(), BatchNormGuard("momentum")
    module.net.bn1.momentum = 0.3
    wanted, starts = momenta(module.net), list[Any]()
    look = At("on_fit_start", lambda t, m: starts.append(momenta(m.net)))
    for _ in range(2):
        try:
            fit(guard, look, At("on_train_batch_end", end), module=module, max_epochs=1)
        except KeyError:
            assert fails
        assert momenta(module.net) == wanted
    assert starts == [wanted, wanted]
    said = "3 layers momentum 0.1 -> 1 - 0.9^(1/N), 0.3 -> 1 - 0.7^(1/N)"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("how", [{}, split()])
def test_momentum_that_the_user_has_changed_stays_theirs(how: Any) -> None:
    def change(trainer: Any, module: Any) -> None:
        if trainer.fit_loop.total_batch_idx == 3:
            module.net.bn1.momentum = 0.25

    changes = At("on_train_batch_end", change)
    module = fit("momentum", changes, module=Still(), **how)
    assert momenta(module.net) == {"bn1": 0.25, "bn2": 0.1, "bn3": 0.1}


@pytest.mark.filterwarnings("ignore:Swapping scheduler")
def test_stochastic_weight_averaging_keeps_its_plain_mean() -> None:
    """Its last epoch computes the plain mean of all batches, with momentum=None."""
    seen: list[Any] = []
    look = At(
        "on_train_batch_end",
        lambda t, m: seen.append((t.current_epoch, momenta(m.net)["bn1"])),
    )
    ends = []
    for policy in ("momentum", None):
        averaging = StochasticWeightAveraging(0.05, swa_epoch_start=2)
        ends.append(fit(policy, look, averaging, max_epochs=4))
        last = max(epoch for epoch, _ in seen)
        assert {m for epoch, m in seen if epoch == last} == {None}
        assert set(momenta(ends[-1].net).values()) == {0.1}
        seen.clear()
    # In training nothing is normalised by running statistics: both learn the same.
    assert all(map(torch.equal, ends[0].parameters(), ends[1].parameters()))
    means = [each.net.bn3.running_mean for each in ends]
    torch.testing.assert_close(*means)


def test_table_says_that_the_plain_mean_is_left_as_it_is(capsys: Any) -> None:
    module = ConvModule()
    for name in ("bn1", "bn2", "bn3"):
        getattr(module.net, name).momentum = None
    fit("momentum", module=module, max_epochs=1)
    assert "momentum=None, the plain mean of all" in capsys.readouterr().out
