"""What a group may hold, and that what it chooses reaches modules of every kind."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from omegaconf import OmegaConf

from tests.helpers import (
    QUIET,
    TokenModule,
    TokenNet,
    loader,
    ragged_sequences,
    token_loss,
    trainer,
    weights,
)
from trainkit import (
    AccumulationCallback,
    AccumulationMixin,
    PerToken,
    TrainkitError,
    Uniform,
)
from trainkit.config.attach import attach_accumulation, attach_optimizer
from trainkit.config.groups import nodes_of

NET = {"_target_": f"{__name__}.MyModule"}


def groups(**nodes: Any) -> Any:
    names = ("model", "data", "accumulation", "micro_batching", "schedule")
    names += ("lr_scaling", "batchnorm", "optimizer", "scheduler", "callbacks")
    whole = {**dict.fromkeys((*names, "logger")), "trainer": NET, **nodes}
    return OmegaConf.create(whole)


class MyModule:
    pass


MINE = "tests.config.test_groups.MyModule"
OF_AN_OPTION = r"schedule: must have a _target_ .* received size.* '~schedule.size'"


@pytest.mark.parametrize(
    ("group", "node", "text"),
    [
        ("model", {"depth": 1}, "model: must have a _target_ or be null, received d"),
        ("trainer", None, "trainer: must have a _target_ or .*received None"),
        ("accumulation", "per_token", "must have .*, received 'per_token'"),
        ("schedule", {"size": 3}, OF_AN_OPTION),
        ("callbacks", {"_target_": MINE}, "callbacks: must hold entries by name"),
        ("logger", {"x": 1}, "logger.x: must have a _target_ or be null, received 1"),
        ("logger", {"x": {"a": 1}}, r"received a\..* take it out: '~logger.x.a'"),
    ],
)
def test_what_describes_no_object_is_refused(group: str, node: Any, text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        list(nodes_of(groups(**{group: node})))


def test_empty_groups_describe_nothing() -> None:
    config = groups(model={"_target_": None}, callbacks={"x": None, "y": {**NET}})
    assert [key for key, _ in nodes_of(config)] == ["trainer", "callbacks.y"]


# ---- it reaches modules of every kind ------------------------------------------------


SEQUENCES = ragged_sequences(12)
make_sgd = functools.partial(torch.optim.SGD, lr=0.5)


class Bare(pl.LightningModule):
    """Without an optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = TokenNet()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return token_loss(self.net, batch)


class BareMixin(AccumulationMixin, Bare):
    """Chooses its own strategy, as a class."""

    accumulation = Uniform()


class OldBare(pytorch_lightning.LightningModule):
    """The same, in Lightning's other namespace."""

    def __init__(self) -> None:
        super().__init__()
        self.net = TokenNet()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return token_loss(self.net, batch)


def fit(module: Any, *callbacks: Any, **options: Any) -> torch.Tensor:
    run = trainer(4, callbacks=list(callbacks), **options)
    run.fit(module, loader(SEQUENCES, 2))
    return weights(module)


# ---- accumulation --------------------------------------------------------------------


def test_a_mixin_module_gets_the_strategy_in_place_of_its_own() -> None:
    module = BareMixin()
    assert attach_accumulation(module, PerToken()) == []
    assert module.accumulation == PerToken()
    assert BareMixin.accumulation == Uniform()


@pytest.mark.parametrize("module_class", [Bare, OldBare])
def test_any_other_module_gets_a_callback(module_class: type) -> None:
    (callback,) = attach_accumulation(module_class(), PerToken(ignore_index=-1))
    assert isinstance(callback, AccumulationCallback)
    assert callback.strategy == PerToken(ignore_index=-1)


@pytest.mark.parametrize("module_class", [Bare, BareMixin])
def test_no_strategy_changes_nothing(module_class: type) -> None:
    module = module_class()
    before = dict(vars(module))
    assert attach_accumulation(module, None) == []
    assert vars(module) == before


@pytest.mark.parametrize("module_class", [Bare, BareMixin])
def test_the_class_of_a_strategy_is_refused(module_class: type) -> None:
    with pytest.raises(TrainkitError, match=r"not its class or name"):
        attach_accumulation(module_class(), PerToken)  # type: ignore[arg-type]


def test_both_kinds_of_module_train_to_the_same_weights() -> None:
    ends = {}
    for kind in (Bare, BareMixin):
        module = kind()
        attach_optimizer(module, make_sgd)
        ends[kind] = fit(module, *attach_accumulation(module, PerToken()))
    assert torch.equal(ends[Bare], ends[BareMixin])
    uniform = BareMixin()
    attach_optimizer(uniform, make_sgd)
    assert not torch.equal(fit(uniform), ends[Bare])


# ---- optimizer -----------------------------------------------------------------------


def test_an_attached_optimizer_equals_a_written_one() -> None:
    class Written(Bare):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    attached = Bare()
    attach_optimizer(attached, make_sgd)
    assert torch.equal(fit(attached), fit(Written()))


def test_a_module_of_the_other_namespace_gets_one_too() -> None:
    module = OldBare()
    attach_optimizer(module, make_sgd)
    run = pytorch_lightning.Trainer(**QUIET)
    before = weights(module)
    run.fit(module, loader(SEQUENCES, 2))
    assert not torch.equal(weights(module), before)


@pytest.mark.parametrize(("interval", "num_moves"), [("step", 6), ("epoch", 2)])
def test_the_scheduler_counts_what_is_said(interval: Any, num_moves: int) -> None:
    module = Bare()
    asked: list[float] = []

    def make_scheduler(optimizer: Any) -> Any:
        asked.append(module.trainer.estimated_stepping_batches)
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    attach_optimizer(module, make_sgd, make_scheduler, interval=interval)
    run = trainer(2, max_epochs=2)
    run.fit(module, loader(SEQUENCES, 2))
    assert asked == [6]  # it was made when the Trainer knew
    assert run.optimizers[0].param_groups[0]["lr"] == 0.5 * 0.5**num_moves


def test_the_scheduler_sees_the_metric_it_monitors() -> None:
    class Logs(Bare):
        def on_train_epoch_end(self) -> None:
            self.log("flat", 1.0)

    module = Logs()
    make = functools.partial(
        torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.1
    )
    attach_optimizer(module, make_sgd, make, interval="epoch", monitor="flat")
    run = trainer(max_epochs=2)
    run.fit(module, loader(SEQUENCES, 2))
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.05)


def test_copies_and_pickles_have_an_optimizer_of_their_own() -> None:
    module = Bare()
    attach_optimizer(module, make_sgd)
    twins: list[Any] = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    for twin in twins:
        groups = twin.configure_optimizers()["optimizer"].param_groups
        assert groups[0]["params"][0] is next(twin.parameters())


def test_a_second_optimizer_is_refused() -> None:
    said = r"TokenModule: it defines .*Choose\s+optimizer=none"
    with pytest.raises(TrainkitError, match=said):
        attach_optimizer(TokenModule(), make_sgd)
    module = Bare()
    attach_optimizer(module, make_sgd)
    with pytest.raises(TrainkitError, match="Bare: it defines configure_optimizers"):
        attach_optimizer(module, make_sgd)


def test_a_proof_needs_a_strategy_and_no_proof_needs_none() -> None:
    """Of plain accumulation there is nothing to prove."""
    assert attach_accumulation(Bare(), None, proof="off") == []
    with pytest.raises(TrainkitError, match="no accumulation was chosen, .*'require'"):
        attach_accumulation(Bare(), None, proof="require")
