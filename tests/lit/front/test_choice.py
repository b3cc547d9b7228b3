"""What a mixin module says a micro-batch weighs: nothing, late, or something else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import pytorch_lightning as old
import torch
from torch.nn.functional import cross_entropy

from tests.helpers import (
    NAIVE,
    TOLERANCE,
    TokenModule,
    TokenNet,
    deviation,
    loader,
    pad,
    ragged_sequences,
    trainer,
)
from tests.lit.fronts import plain_token_loss, sample_loss
from trainkit import (
    AccumulationMixin,
    AccumulationStrategy,
    MicroBatching,
    PerSample,
    PerToken,
    Uniform,
)
from trainkit.errors import TrainkitError

DROPPED = "ignore:accumulation. an open window of:UserWarning"
EXACT = TOLERANCE[torch.float64]
DATA = ragged_sequences(40)
NO_STRATEGY = r"accumulation: a module with AccumulationMixin must say.*PerSample\(\)"


class Says(AccumulationMixin, TokenModule):
    """A module that says nothing by itself."""


def fitted(module: Any, accumulate: int = 4, batch: int = 4, **options: Any) -> Any:
    trainer(accumulate, **options).fit(module, loader(DATA, batch))
    return module


# ---- nothing -------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 4])
def test_module_without_a_strategy_is_refused_when_fit_begins(accumulate: int) -> None:
    """As `Uniform()`, the default of before, it was 35 % off on ragged data."""
    module = Says()
    with pytest.raises(TrainkitError, match=NO_STRATEGY) as refused:
        fitted(module, accumulate)
    for name in ("PerToken()", "Uniform()", "Says.accumulation", "--accumulation="):
        assert name in str(refused.value)
    fresh = Says()
    assert torch.equal(module.net.head.weight, fresh.net.head.weight)


def test_it_is_refused_before_the_sanity_check() -> None:
    class Validated(Says):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise AssertionError("too late")

    with pytest.raises(TrainkitError, match=NO_STRATEGY):
        trainer(4).fit(Validated(), loader(DATA, 4), loader(DATA, 4))


def test_both_namespaces_refuse() -> None:
    base: Any = old.LightningModule

    class Old(AccumulationMixin, base):
        def __init__(self) -> None:
            super().__init__()
            self.net = TokenNet()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return plain_token_loss(self.net, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    fit = old.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(TrainkitError, match=NO_STRATEGY):
        fit.fit(Old(), loader(DATA, 4))


def test_manual_optimization_and_split_windows_refuse_too() -> None:
    manual, split = Says(), Says()
    manual.automatic_optimization = False
    split.micro_batching = MicroBatching(size=2)
    for module in (manual, split):
        with pytest.raises(TrainkitError, match=NO_STRATEGY):
            fitted(module)


def test_without_fit_nothing_is_asked() -> None:
    class Validated(Says):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", plain_token_loss(self.net, batch))

    results = trainer().validate(Validated(), loader(DATA, 4), verbose=False)
    assert "val" in results[0]


def test_log_exact_without_a_strategy_is_refused() -> None:
    class Logs(Says):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log_exact("val", plain_token_loss(self.net, batch), batch)

    with pytest.raises(TrainkitError, match=NO_STRATEGY):
        trainer().validate(Logs(), loader(DATA, 4), verbose=False)


# ---- Uniform() by name ---------------------------------------------------------------


class Alike(AccumulationMixin, TokenModule):
    accumulation = Uniform()


def test_uniform_is_never_called_exact(capsys: Any) -> None:
    fitted(Alike(), 4, 3)
    said = capsys.readouterr().out
    assert "exact" not in said
    assert "every micro-batch has weight 1" in said
    assert "micro-batches have 3 samples, the last of an epoch 1" in said


def test_uniform_says_how_unlike_micro_batches_were(capsys: Any) -> None:
    fitted(Alike(), 2, 3, max_epochs=1)
    said = capsys.readouterr().out
    assert said.count("the first 14 micro-batches held 1 to 3 samples, ") == 1
    assert "numbers in the largest tensor, and counted alike" in said


def test_other_strategies_say_nothing_of_it(capsys: Any) -> None:
    class Tokens(AccumulationMixin, TokenModule):
        accumulation = PerToken()

    fitted(Tokens())
    said = capsys.readouterr().out
    assert "alike" not in said
    assert "weight 1" not in said


# ---- another one in mid-training -----------------------------------------------------

LOSSES = {PerToken(): plain_token_loss, PerSample(): sample_loss}


class Turns(AccumulationMixin, TokenModule):
    """Another loss, and so another strategy, from some batch on."""

    def __init__(self, at: int, where: str = "epoch") -> None:
        super().__init__(dtype=torch.float64)
        self.accumulation = PerToken()
        self.at, self.where = at, where

    def turn(self, number: int, where: str) -> None:
        if where == self.where and number == self.at:
            self.accumulation = PerSample()

    def on_train_epoch_start(self) -> None:
        self.turn(self.current_epoch, "epoch")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.turn(self.current_epoch * 10 + batch_idx, "batch")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = LOSSES[self.accumulation](self.net, batch)
        self.log_exact(f"loss {self.current_epoch}", loss, batch)
        return loss


class TurnsByHand(Turns):
    def __init__(self, at: int, where: str = "epoch") -> None:
        super().__init__(at, where)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.accumulate(LOSSES[self.accumulation](self.net, batch), batch)
        if self.window_ends(batch_idx):
            self.finish_window()
            optimizer: Any = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()


def reference(turn_at_window: int) -> TokenModule:
    module = TokenModule(dtype=torch.float64)
    optimizer = module.configure_optimizers()
    windows = [DATA[i : i + 16] for i in (0, 16, 32)] * 2
    for number, window in enumerate(windows):
        optimizer.zero_grad()
        loss = plain_token_loss if number < turn_at_window else sample_loss
        loss(module.net, pad(window)).backward()
        optimizer.step()
    return module


@pytest.mark.parametrize("kind", [Turns, TurnsByHand])
@pytest.mark.parametrize(
    ("at", "where", "window"), [(1, "epoch", 3), (4, "batch", 1), (10, "batch", 3)]
)
def test_strategy_of_another_window_equals_the_big_batch(
    kind: Any, at: int, where: str, window: int
) -> None:
    """The window went by the first strategy and `log_exact` by the new one."""
    module = fitted(kind(at, where))
    start = TokenModule(dtype=torch.float64)
    assert deviation(module, reference(window), start) <= EXACT
    assert deviation(module, reference(99), start) > NAIVE


class SplitTurns(Turns):
    micro_batching = MicroBatching(size=3)


def test_strategy_of_another_split_window_equals_the_big_batch() -> None:
    module = fitted(SplitTurns(1, "batch"), 1, 16)
    start = TokenModule(dtype=torch.float64)
    assert deviation(module, reference(1), start) <= EXACT
    assert deviation(module, reference(99), start) > NAIVE


@pytest.mark.filterwarnings(DROPPED)
@pytest.mark.parametrize("kind", [Turns, TurnsByHand])
def test_another_strategy_inside_a_window_is_refused(kind: Any) -> None:
    with pytest.raises(TrainkitError, match=r"micro-batches so far: \d\) was.*PerT"):
        fitted(kind(5, "batch"))


@pytest.mark.filterwarnings(DROPPED)
def test_none_in_mid_training_is_refused() -> None:
    class Forgets(Turns):
        def turn(self, number: int, where: str) -> None:
            if number == self.at:
                self.accumulation = None

    with pytest.raises(TrainkitError, match=NO_STRATEGY):
        fitted(Forgets(1))


def test_equal_strategy_inside_a_window_changes_nothing() -> None:
    class Renews(Turns):
        def turn(self, number: int, where: str) -> None:
            self.accumulation = PerToken()

    module = fitted(Renews(0))
    start = TokenModule(dtype=torch.float64)
    assert deviation(module, reference(99), start) <= EXACT


@dataclass
class ByLabel(AccumulationStrategy):
    """Two of them cannot be compared by ==."""

    weights: torch.Tensor

    def weight(self, batch: Any) -> torch.Tensor:
        labels = batch["labels"]
        return self.weights[labels[labels != -100]].sum()


def loss_by_label(weights: torch.Tensor) -> Any:
    return lambda net, batch: cross_entropy(
        net(batch["ids"]).flatten(0, 1), batch["labels"].flatten(), weight=weights
    )


class MadeAnew(AccumulationMixin, TokenModule):
    """A strategy is made whenever it is asked for, of weights that turn."""

    def __init__(self, turns: bool = True) -> None:
        super().__init__(dtype=torch.float64)
        self.turns = turns
        self.choose(0)

    def choose(self, epoch: int) -> None:
        size = self.net.embed.num_embeddings
        self.weights = torch.linspace(0.5, 2 + 5 * epoch, size, dtype=torch.float64)

    @property
    def accumulation(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return ByLabel(self.weights)

    def on_train_epoch_start(self) -> None:
        if self.turns:
            self.choose(self.current_epoch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return loss_by_label(self.weights)(self.net, batch)


@pytest.mark.parametrize("turns", [False, True])
def test_strategy_that_holds_tensors_may_be_made_anew(turns: bool) -> None:
    """Made of the same weights it is the same; of others, another one."""
    module, expected = MadeAnew(turns), MadeAnew(turns)
    fitted(module, max_epochs=2)
    optimizer = expected.configure_optimizers()
    for epoch in range(2):
        expected.choose(epoch if turns else 0)
        for begin in (0, 16, 32):
            optimizer.zero_grad()
            batch = pad(DATA[begin : begin + 16])
            loss_by_label(expected.weights)(expected.net, batch).backward()
            optimizer.step()
    start = MadeAnew()
    assert deviation(module, expected, start) <= EXACT
    if turns:
        assert deviation(fitted(MadeAnew(False), max_epochs=2), expected, start) > NAIVE


@pytest.mark.filterwarnings(DROPPED)
def test_micro_batching_in_mid_training_is_refused() -> None:
    class Cuts(Turns):
        def turn(self, number: int, where: str) -> None:
            if where == "batch" and number == 3:
                self.micro_batching = MicroBatching(size=1)

    with pytest.raises(TrainkitError, match="Assign it before trainer.fit"):
        fitted(Cuts(3))
