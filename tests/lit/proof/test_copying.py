"""A copy of a module shares nothing that training writes."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from tests.helpers import trainer
from tests.lit.proof.starting import fit, plain_trainer, said, tokens
from tests.zoo import causes
from tests.zoo.causes import Tokens
from trainkit import AccumulationCallback, PerToken
from trainkit.lit.proof import copying
from trainkit.lit.proof.copying import Copies, move_weights, read_apart


class Rich(Tokens):
    """Holds of everything a little."""

    def __init__(self) -> None:
        super().__init__()
        self.data = DataLoader(causes.sequences(4), batch_size=2)  # type: ignore[arg-type]
        self.graph = self.head.weight * 2
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.tied = self.head.weight
        self.backend = math
        self.calls: list[int] = []
        self.generator = torch.Generator().manual_seed(3)
        own = math
        self.head.register_forward_hook(lambda *_: self.calls.append(own.ceil(1)))
        self.head.weight.register_hook(lambda g: g * len(self.calls))


def copied(module: Any, **options: Any) -> Copies:
    return Copies(plain_trainer(), module, **options)


def test_a_copy_is_its_own() -> None:
    module, fabric = Rich(), Fabric(accelerator="cpu")
    module.fabric = fabric
    copy = copied(module).module
    assert copy._fabric is None
    assert copy.data is module.data
    assert copy.backend is math
    assert torch.equal(copy.graph, module.graph)
    assert copy.graph.is_leaf
    assert copy.tied is copy.head.weight is not module.head.weight
    batch = causes.padded(causes.sequences(3))
    copy.training_step(batch, 0).backward()
    assert module.calls == []
    assert copy.calls == [1]
    assert module.head.weight.grad is None


class Measured(Tokens):
    """Logs metric objects, which Lightning finds again by their identity."""

    def __init__(self) -> None:
        super().__init__()
        self.training_mean, self.mean = MeanMetric(), MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.training_mean.update(loss.detach())
        self.log("train/mean", self.training_mean)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.mean.update(super().training_step(batch, batch_idx))
        self.log("val/mean", self.mean)


def test_metrics_that_were_logged_before_are_found_in_the_copy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By the validation before training, say."""
    own = AccumulationCallback(PerToken())
    pl = trainer(2, max_epochs=1, num_sanity_val_steps=1, callbacks=[own])
    pl.fit(Measured(), tokens(), tokens())
    assert said(capsys).startswith("exact on")


def test_hooks_close_over_the_copy() -> None:
    """The control: as they are, they would work with the module itself."""
    module = Rich()
    copy = copied(module).module
    copy.calls.extend([1, 1])
    (copy.head.weight.sum() * 1.0).backward()
    assert torch.equal(copy.head.weight.grad, torch.full_like(copy.head.weight, 2.0))


def test_large_frozen_parameters_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "LARGE", 10)
    module = Rich()
    copies = copied(module)
    assert copies.module.frozen.weight is module.frozen.weight
    assert copies.module.frozen.bias is not module.frozen.bias
    assert copied(module, shares=False).module.frozen.weight is not module.frozen.weight
    before = module.frozen.weight.clone()
    move_weights(copies.module, copies.shared)
    assert torch.equal(module.frozen.weight, before)
    assert not torch.equal(copies.module.head.weight, module.head.weight)


class Following(Tokens):
    """Moves a frozen copy in each step."""

    def __init__(self, write: Any) -> None:
        super().__init__()
        self.target = nn.Linear(16, 16).requires_grad_(False)
        self.write = write

    def features(self, batch: Any) -> Tensor:
        hidden = super().features(batch)
        with torch.no_grad():
            self.write(self.target.weight)
        return hidden


@pytest.mark.filterwarnings("ignore:training_step has changed target.weight")
@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.mul_(0.5),
        lambda weight: weight.data.add_(1),
        lambda weight: weight.copy_(torch.zeros(16, 16)),
        lambda weight: weight.data.mul_(2.0),
    ],
)
def test_a_shared_parameter_is_never_written(
    write: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(copying, "LARGE", 10)
    trained = []
    for proof in ("require", "off"):
        torch.manual_seed(1)
        module = Following(write)
        fit(module, tokens(), PerToken(), proof=proof, limit_train_batches=2)
        trained.append(module.target.weight.clone())
    assert torch.equal(*trained)
    assert said(capsys).startswith("exact on")


def test_moved_weights_are_alike_in_each_copy() -> None:
    module = Rich()
    nn.init.zeros_(module.head.bias)
    module.head.weight.data.mul_(100)
    ones, others = (copied(module) for _ in range(2))
    for each in (ones, others):
        move_weights(each.module, each.shared)
    for one, other in zip(
        ones.module.parameters(), others.module.parameters(), strict=True
    ):
        assert torch.equal(one, other)
    moved = ones.module.head.bias
    assert 0.005 < float(moved.detach().std()) < 0.1
    own = module.head.weight.detach()
    off = ones.module.head.weight.detach() - own
    assert 0.01 < float(off.std() / own.std()) < 0.2


def test_a_data_set_is_read_apart_down_to_four_objects() -> None:
    own: Any = None
    for _ in range(6):
        own = SimpleNamespace(inner=own)
    copy, is_shared = read_apart(own), []
    while own is not None:
        is_shared.append(copy is own)
        own, copy = own.inner, copy.inner
    assert is_shared == 4 * [False] + 2 * [True]
