"""What a check advises works: with it, the next check says exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.lit.proof.starting import plain_trainer
from tests.lit.proof.test_check import check
from tests.zoo.causes import (
    Images,
    Tokens,
    class_weighted,
    classified,
    image_loader,
    token_loader,
)
from trainkit import (
    AccumulationCallback,
    AccumulationMixin,
    BatchNormGuard,
    PerClassWeight,
    PerSample,
    PerToken,
    TrainkitError,
    Weighed,
)


@pytest.mark.parametrize(
    "guard",
    [
        BatchNormGuard("group_norm"),
        BatchNormGuard("freeze"),
        BatchNormGuard("ignore"),
    ],
)
def test_a_guard_that_makes_rows_independent_is_exact(guard: BatchNormGuard) -> None:
    """The control: a guard that leaves the layers as they are."""
    module = Images(classified, nn.BatchNorm2d)
    layer, held = module.net[1], set(vars(module.net[1]))
    trainer = plain_trainer([AccumulationCallback(PerSample()), guard])
    report = check(module, image_loader(), trainer=trainer)
    assert report.exact == (guard.policy != "ignore")
    assert module.net[1] is layer
    assert layer.training
    assert set(vars(layer)) == held
    assert all(each.requires_grad for each in module.parameters())


def test_an_attribute_that_nothing_reads_is_no_strategy() -> None:
    """A module without the mixin trains as plain Lightning does, whatever it sets."""

    class Unread(Tokens):
        accumulation = PerToken()

    class Read(AccumulationMixin, Tokens):
        accumulation = PerToken()

    report = check(Unread(), token_loader())
    assert not report.exact
    (cause,) = report.causes
    first, second = cause.remedy
    assert first == "accumulation = PerToken()"
    assert "AccumulationMixin" in second
    assert "AccumulationCallback" in second
    assert check(Read(), token_loader()).exact


class ByHand(Tokens):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.backward_of(super().training_step(batch, batch_idx), batch)

    def backward_of(self, loss: Tensor, batch: Any) -> None:
        self.manual_backward(loss)


class Mixed(AccumulationMixin, ByHand):
    accumulation = PerToken()


class Accumulated(Mixed):
    def backward_of(self, loss: Tensor, batch: Any) -> None:
        self.accumulate(loss, batch)


@pytest.mark.parametrize("kind", [ByHand, Mixed])
def test_what_goes_backward_by_itself_is_not_weighed(kind: Any) -> None:
    report = check(kind(), token_loader())
    assert not report.exact
    (cause,) = report.causes
    assert "self.accumulate(loss, batch, optimizer=...)" in cause.remedy[-1]
    assert check(Accumulated(), token_loader()).exact


def test_a_strategy_that_needs_the_module_is_set_in_its_init() -> None:
    (cause,) = check(Tokens(class_weighted), token_loader(), strategy=PerToken()).causes
    (line,) = cause.remedy
    name = "self.accumulation = PerClassWeight(weight=self.class_weights"
    assert line.startswith(name)

    class Pasted(AccumulationMixin, Tokens):
        def __init__(self) -> None:
            super().__init__(class_weighted)
            exec(line, {"self": self, "PerClassWeight": PerClassWeight})

    assert check(Pasted(), token_loader()).exact


def test_class_weights_that_nobody_shows_are_solved() -> None:
    """The control: the number of rows, which the run counts."""

    def hidden(module: Any, maps: Tensor, batch: Any) -> Tensor:
        logits, rates = module.head(maps.mean((2, 3))), torch.arange(1.0, 6)
        return F.cross_entropy(logits, batch[1], weight=rates.to(logits))

    module = Images(hidden)
    (cause,) = check(module, image_loader(), strategy=PerSample()).causes
    line = "PerClassWeight(weight=[1.0, 2.0, 3.0, 4.0, 5.0], labels=1)"
    assert cause.remedy == (f"accumulation = {line}",)
    assert check(module, image_loader(), strategy=eval(line)).exact


# ---- losses that divide by what training_step alone knows ----------------------------


class Foreign(Tokens):
    """Masks tokens at random, and leaves behind how many it has kept."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        logits = self.head(self.features(batch)).transpose(1, 2)
        losses = F.cross_entropy(logits, batch["labels"], reduction="none")
        kept = (torch.rand(batch["ids"].shape) < 0.5) & (batch["labels"] != -100)
        self.num_kept = kept.sum()
        return (losses * kept).sum() / kept.sum().clamp(min=1)


class Masking(AccumulationMixin, Foreign):
    """Says it."""

    accumulation = Weighed()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.weigh(self.num_kept)
        return loss


class Wrong(Masking):
    """Says its rows."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        self.weigh(len(batch["ids"]))
        return super(Masking, self).training_step(batch, batch_idx)


class MaskingByHand(Masking):
    def __init__(self, *, explicit: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.explicit = explicit

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        loss = super(Masking, self).training_step(batch, batch_idx)
        if self.explicit:
            self.accumulate(loss, batch, weight=self.num_kept)
        else:
            self.weigh(self.num_kept)
            self.accumulate(loss, batch)


@pytest.mark.parametrize(
    ("module", "strategy"),
    [
        (Masking(), None),
        (Foreign(), Weighed(by=lambda module, batch: module.num_kept)),
        (MaskingByHand(explicit=False), None),
        (MaskingByHand(explicit=True), None),
    ],
    ids=["said", "by a function", "by hand", "by hand, itself"],
)
def test_what_was_said_is_exact(module: Any, strategy: Any) -> None:
    report = check(module, token_loader(), strategy=strategy)
    assert report.exact, str(report)
    assert report.deviation < 1e-12
    offs = [note.rpartition(" ")[2] for note in report.notes if "plain acc" in note]
    assert len(offs) == module.automatic_optimization
    assert all(float(off) > 1e-2 for off in offs)  # the control


@pytest.mark.parametrize(
    ("module", "strategy"), [(Foreign(), PerToken()), (Wrong(), None)]
)
def test_another_count_is_not_and_the_remedy_named(module: Any, strategy: Any) -> None:
    report = check(module, token_loader(), strategy=strategy)
    assert not report.exact
    (cause,) = report.causes
    assert "with weights that nothing in the batch counts" in cause.text
    assert cause.remedy[0].startswith("accumulation = Weighed(), and in training_step")
    assert "Weighed(by=...)" in cause.remedy[1]


def test_a_plain_module_needs_a_function() -> None:
    with pytest.raises(TrainkitError, match="name a function that counts"):
        check(Foreign(), token_loader(), strategy=Weighed())
