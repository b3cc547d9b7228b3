"""What exact BatchNorm refuses, by name."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.lit.batch_norm.exact_fits import CLASSES, Images, apart, exact, fit, loader
from trainkit import (
    AccumulationCallback,
    AccumulationMixin,
    AccumulationSchedule,
    BatchNormGuard,
    MicroBatching,
    PerSample,
    Weighed,
)
from trainkit.errors import TrainkitError

SPLIT = MicroBatching(size=4)
INSIDE = MicroBatching(inside="net", size=4)
ONE_BATCH = (
    r"a window must be one loader batch.*MicroBatching\(size=4\), which is "
    r"MicroBatching\(inside='net', size=4\) here"
)


@pytest.mark.parametrize("cut", [None, SPLIT, INSIDE])
def test_windows_of_several_loader_batches(cut: MicroBatching | None) -> None:
    with pytest.raises(TrainkitError, match=rf"{ONE_BATCH}"):
        fit(Images(), *exact(cut), window=2)  # type: ignore[arg-type]


def test_rows_of_a_whole_window_are_named() -> None:
    text = r"20 in place of 10 rows \(batch_size\), set accumulate_grad_batches=1"
    with pytest.raises(TrainkitError, match=text):
        fit(Images(), *exact(SPLIT), window=2)


def test_without_the_callback_too() -> None:
    with pytest.raises(TrainkitError, match="made by 2 loader batches"):
        fit(Images(), BatchNormGuard("exact"), window=2)


class Begun(pl.Callback):
    """Notes whether a batch has begun."""

    has = False

    def on_train_batch_start(self, *of: Any, **named: Any) -> None:
        self.has = True


@pytest.mark.parametrize("cut", [None, SPLIT, INSIDE])
@pytest.mark.parametrize("kind", [AccumulationSchedule, GradientAccumulationScheduler])
def test_schedule_that_will_make_several(kind: Any, cut: MicroBatching | None) -> None:
    begun, said = Begun(), f"before the first .*{kind.__name__} will make windows of 2"
    with pytest.raises(TrainkitError, match=said) as caught:
        fit(Images(), *exact(cut), kind({0: 1, 2: 2}), begun)  # type: ignore[arg-type]
    assert not begun.has
    assert "accumulate_grad_batches" not in str(caught.value)


def test_schedule_that_makes_none() -> None:
    schedule = GradientAccumulationScheduler({0: 1})
    fit(Images(), *exact(SPLIT), schedule, epochs=1)


def test_callback_that_makes_several_without_saying_so() -> None:
    class Larger(pl.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.accumulate_grad_batches = 1 + trainer.current_epoch

    with pytest.raises(TrainkitError, match=ONE_BATCH):
        fit(Images(), *exact(SPLIT), Larger())


class ByHand(AccumulationMixin, Images):
    accumulation = PerSample()

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.accumulate(F.cross_entropy(self.net(batch[0]), batch[1]), batch)
        self.finish_window(optimizer)
        optimizer.step()  # type: ignore[union-attr]
        optimizer.zero_grad()  # type: ignore[union-attr]


def test_manual_optimization() -> None:
    with pytest.raises(TrainkitError, match="made by manual optimization"):
        fit(ByHand(), BatchNormGuard("exact"))


def test_modules_without_batch_norm_are_not_refused() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 6 * 6, CLASSES))
    fit(Images(net), *exact(None), window=2)  # type: ignore[arg-type]


def test_memory_has_no_effect_any_more() -> None:
    with pytest.warns(UserWarning, match="memory= has no effect any more"):
        BatchNormGuard("exact", memory="flat")
    with pytest.raises(TrainkitError, match="it belongs to the policy 'exact'"):
        BatchNormGuard("warn", memory="flat")


class Counts(Images):
    """Leaves what its loss divides by, before or after it calls the net."""

    is_early = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        if self.is_early:
            self.number = int((y > 0).sum())
        losses = F.cross_entropy(self.net(x), y, reduction="none")
        self.number = self.number if self.is_early else int((y > 0).sum())
        return losses[y > 0].mean()


@pytest.mark.parametrize("is_early", [True, False])
def test_what_is_left_for_counting_before_or_after_the_call(is_early: bool) -> None:
    strategy = Weighed(by=lambda module, batch: module.number)
    plain, module = Counts(), Counts()
    plain.is_early = module.is_early = is_early
    fit(plain)
    fit(module, *exact(SPLIT, strategy=strategy))
    assert apart(module, plain) <= 1e-10


class OwnBackward(Images):
    """Something that trains runs before its net."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Conv2d(3, 3, 1).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(self.before(batch[0])), batch[1])

    def backward(self, loss: Tensor, **options: Any) -> None:
        loss.backward(**options)


class BareBackward(OwnBackward):
    def backward(self, loss: Tensor) -> None:  # type: ignore[override]
        loss.backward()


@pytest.mark.parametrize("kind", [OwnBackward, BareBackward])
def test_own_backward_pass(kind: Any) -> None:
    plain, module = kind(), kind()
    fit(plain)
    fit(module, *exact(SPLIT))
    assert apart(module, plain) <= 1e-10


class Stem(Images):
    """Calls a layer of its own in the step, and has no forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.BatchNorm2d(3).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(self.stem(batch[0])), batch[1])


def test_layers_that_the_step_calls_itself() -> None:
    text = r"Stem calls stem in its own step.*Here net can be named"
    with pytest.raises(TrainkitError, match=text):
        fit(Stem(), *exact(SPLIT))
    plain, module = Stem(), Stem()
    fit(plain)
    fit(module, *exact(INSIDE))
    assert apart(module, plain) <= 1e-10


def test_arguments_that_are_shared() -> None:
    cut = MicroBatching(inside="net", size=4, shared=("x",))
    with pytest.raises(TrainkitError, match=r"received shared=\['x'\]"):
        fit(Images(), _unproven(cut), BatchNormGuard("exact"))


@pytest.mark.parametrize(
    "cut", [MicroBatching(tokens=8), MicroBatching(size=4, collate=list)]
)
def test_cuts_that_are_not_by_rows(cut: MicroBatching) -> None:
    with pytest.raises(TrainkitError, match="cut by rows alone, received"):
        fit(Images(), *exact(cut))


class Function(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        mean, var = torch.zeros(3).to(x), torch.ones(3).to(x)
        return self.head(F.batch_norm(x, mean, var, training=True).mean((2, 3)))


class Own(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return F.relu(super().forward(input))


class Wanders(nn.Module):
    """How often it calls its layer depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(len(x)):
            x = self.norm(x)
        return self.head(x.mean((2, 3)))


def test_ways_that_depend_on_the_data() -> None:
    with pytest.raises(
        TrainkitError, match=r"must not use __len__ on values of the batch"
    ):
        fit(Images(Wanders()), _unproven(SPLIT), BatchNormGuard("exact"))


def test_tokens_leave_padding_out() -> None:
    cut = MicroBatching(inside="net", tokens=8)
    with pytest.raises(TrainkitError, match="tokens= leaves out padding"):
        fit(Images(), _unproven(cut), BatchNormGuard("exact"))


def test_one_value_for_a_channel() -> None:
    net = nn.Sequential(
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.BatchNorm1d(3), nn.Linear(3, CLASSES)
    )
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        fit(Images(net), *exact(SPLIT), batches=loader(batch_size=1, number=3))


class Checkpointed(nn.Module):
    """Plain torch would move running statistics once more in the backward pass."""

    is_on = False

    def __init__(self) -> None:
        super().__init__()
        conv, norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.block = nn.Sequential(conv, norm, nn.Tanh())
        self.head = nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_on:
            return self.head(self.block(x).mean((2, 3)))
        inner = checkpoint(self.block, x, use_reentrant=False)
        return self.head(inner.mean((2, 3)))  # type: ignore[union-attr]


def with_own() -> nn.Module:
    return nn.Sequential(Own(3), nn.Flatten(), nn.Linear(3 * 6 * 6, CLASSES))


@pytest.mark.parametrize("cut", [SPLIT, INSIDE])
@pytest.mark.parametrize("make", [Function, with_own, Checkpointed])
def test_nets_that_are_right(make: Any, cut: MicroBatching) -> None:
    """BatchNorm as a function, a layer with a forward of its own, and checkpointing."""
    torch.manual_seed(1)
    whole = Images(make())
    module = copy.deepcopy(whole)
    fit(whole)
    module.net.is_on = True  # type: ignore[assignment]
    fit(module, *exact(cut))
    assert apart(module, whole) <= 1e-10


def _unproven(cut: MicroBatching) -> pl.Callback:
    """The proof at the start would meet the refusal first, and say it in a line."""
    return AccumulationCallback(PerSample(), micro_batching=cut, proof="off")
