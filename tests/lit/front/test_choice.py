"""What a mixin module says a micro-batch weighs: nothing, late, or something else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.helpers import (
    NAIVE,
    deviation,
    loader,
    pad,
    ragged_sequences,
    trainer,
    weights,
)
from tests.zoo import (
    Manual,
    Mixed,
    OldMixed,
    Plain,
    hooked,
    old_trainer,
    plain_token_loss,
    sample_loss,
)
from trainkit import AccumulationStrategy, MicroBatching, PerSample, PerToken, Uniform
from trainkit.errors import TrainkitError

pytestmark = pytest.mark.filterwarnings("ignore:accumulation. an open window")
EXACT = 1e-10
DATA = ragged_sequences(40)
WINDOW = 16
NO_STRATEGY = r"accumulation: a module with AccumulationMixin must say.*PerSample\(\)"
START = weights(Plain())


def fitted(module: Any, accumulate: int = 4, batch: int = 4, **options: Any) -> Any:
    trainer(accumulate, **options).fit(module, loader(DATA, batch))
    return module


def too_late(self: Any, batch: Any, batch_idx: int) -> None:
    raise AssertionError("too late")


# ---- nothing -------------------------------------------------------------------------


SILENT = hooked(Mixed, accumulation=None)
LOGS = hooked(
    SILENT, validation_step=lambda self, b, i: self.log("val", self.loss_of(b))
)
LOGS_EXACTLY = hooked(
    SILENT, validation_step=lambda self, b, i: self.log_exact("val", self.loss_of(b), b)
)


def turns_silent(self: Any) -> None:
    self.accumulation = None if self.current_epoch else PerToken()


@pytest.mark.parametrize(
    "fit",
    [
        lambda: fitted(SILENT(), 1),
        # Before the sanity check.
        lambda: trainer(4).fit(
            hooked(SILENT, validation_step=too_late)(), loader(DATA, 4), loader(DATA, 4)
        ),
        lambda: old_trainer().fit(
            hooked(OldMixed, accumulation=None)(), loader(DATA, 4)
        ),
        lambda: fitted(hooked(Manual, accumulation=None)()),
        lambda: fitted(SILENT(cut=MicroBatching(size=2))),
        lambda: fitted(hooked(Mixed, on_train_epoch_start=turns_silent)()),
        lambda: trainer().validate(LOGS_EXACTLY(), loader(DATA, 4), verbose=False),
    ],
)
def test_module_without_a_strategy_is_refused(fit: Callable[[], Any]) -> None:
    """As `Uniform()`, the default of before, it was 35 % off on ragged data."""
    with pytest.raises(TrainkitError, match=NO_STRATEGY) as refused:
        fit()
    for name in ("PerToken()", "Uniform()", ".accumulation", "--accumulation="):
        assert name in str(refused.value)


def test_without_fit_nothing_is_asked() -> None:
    results = trainer().validate(LOGS(), loader(DATA, 4), verbose=False)
    assert "val" in results[0]


# ---- Uniform() by name ---------------------------------------------------------------


def test_uniform_says_how_unlike_micro_batches_were(capsys: Any) -> None:
    """And is never called exact; other strategies say nothing of it."""
    fitted(Mixed(strategy=Uniform()), 4, 3)
    said = capsys.readouterr().out
    assert "exact" not in said
    assert "every micro-batch has weight 1" in said
    assert "micro-batches have 3 samples, the last of an epoch 1" in said
    fitted(Mixed(strategy=Uniform()), 2, 3, max_epochs=1)
    said = capsys.readouterr().out
    assert said.count("the first 14 micro-batches held 1 to 3 samples, ") == 1
    assert "numbers in the largest tensor, and counted alike" in said
    fitted(Mixed())
    said = capsys.readouterr().out
    assert "alike" not in said
    assert "weight 1" not in said


# ---- another one in mid-training -----------------------------------------------------

LOSSES = {PerToken(): plain_token_loss, PerSample(): sample_loss}


class Turns(Mixed):
    """Another loss, and so another strategy, from some epoch or batch on."""

    def __init__(self, at: int, where: str = "epoch", **how: Any) -> None:
        super().__init__(strategy=PerToken(), **how)
        self.at, self.where = at, where

    def turn(self) -> None:
        self.accumulation = PerSample()

    def on_train_epoch_start(self) -> None:
        if self.where == "epoch" and self.current_epoch == self.at:
            self.turn()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.where == "batch" and self.current_epoch * 10 + batch_idx == self.at:
            self.turn()

    def loss_of(self, batch: Any) -> torch.Tensor:
        loss = LOSSES[self.accumulation](self.net, batch)  # type: ignore[index]
        self.log_exact(f"loss {self.current_epoch}", loss, batch)
        return loss


class ByHand(Turns, Manual): ...


def big_batches(loss_of: Callable[[int], Any]) -> torch.Tensor:
    """Six windows of two epochs, each by a loss of its own."""
    module = Plain()
    optimizer = module.configure_optimizers()
    for number, start in enumerate([*range(0, len(DATA), WINDOW)] * 2):
        optimizer.zero_grad()
        loss_of(number)(module.net, pad(DATA[start : start + WINDOW])).backward()
        optimizer.step()
    return weights(module)


def turned(at: int) -> torch.Tensor:
    return big_batches(lambda n: plain_token_loss if n < at else sample_loss)


@pytest.mark.parametrize(
    ("kind", "at", "where", "window"),
    [
        (Turns, 1, "epoch", 3),
        (ByHand, 4, "batch", 1),
        (Turns, 10, "batch", 3),
        (hooked(Turns, micro_batching=MicroBatching(size=3)), 1, "batch", 1),
    ],
)
def test_strategy_of_another_window_equals_the_big_batch(
    kind: Any, at: int, where: str, window: int
) -> None:
    """The window went by the first strategy and `log_exact` by the new one."""
    is_split = kind.micro_batching is not None
    module = fitted(kind(at, where), *((1, WINDOW) if is_split else ()))
    assert deviation(module, turned(window), START) <= EXACT
    assert deviation(module, turned(99), START) > NAIVE


def cuts(self: Any) -> None:
    self.micro_batching = MicroBatching(size=1)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Turns, r"micro-batches so far: \d\) was.*PerT"),
        (ByHand, r"micro-batches so far: \d\) was.*PerT"),
        (hooked(Turns, turn=cuts), "Assign it before trainer.fit"),
    ],
)
def test_a_turn_inside_a_window_is_refused(kind: Any, text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        fitted(kind(5, "batch"))


@dataclass
class ByLabel(AccumulationStrategy):
    """Two of them cannot be compared by ==."""

    weights: torch.Tensor

    def weight(self, batch: Any) -> torch.Tensor:
        labels = batch["labels"]
        return self.weights[labels[labels != -100]].sum()


@cache
def rates(epoch: int) -> torch.Tensor:
    return torch.linspace(0.5, 2 + 5 * epoch, 13, dtype=torch.float64)


def loss_by_label(epoch: int) -> Any:
    return lambda net, batch: cross_entropy(
        net(batch["ids"]).flatten(0, 1), batch["labels"].flatten(), weight=rates(epoch)
    )


class MadeAnew(Mixed):
    """A strategy is made whenever it is asked for, of weights that turn."""

    turns = True

    @property
    def accumulation(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return ByLabel(rates(self.epoch))

    @property
    def epoch(self) -> int:
        return self.current_epoch if self.turns and self._trainer else 0

    def loss_of(self, batch: Any) -> torch.Tensor:
        return loss_by_label(self.epoch)(self.net, batch)


@pytest.mark.parametrize("turns", [False, True])
def test_strategy_that_holds_tensors_may_be_made_anew(turns: bool) -> None:
    """Made of the same weights it is the same; of others, another one."""
    module = fitted(hooked(MadeAnew, turns=turns)())
    fixed, turning = (
        big_batches(lambda n, k=k: loss_by_label(k * (n // 3))) for k in (0, 1)
    )
    same, other = (turning, fixed) if turns else (fixed, turning)
    assert deviation(module, same, START) <= EXACT
    assert deviation(module, other, START) > NAIVE
