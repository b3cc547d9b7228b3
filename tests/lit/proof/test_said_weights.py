"""`check` of losses that divide by what `training_step` alone knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import trainkit
from tests.helpers import quiet_lightning
from tests.zoo.causes import Tokens, token_loader
from trainkit import AccumulationMixin, PerToken, TrainkitError, Weighed


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


class ByHand(Masking):
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


def count(module: Any, batch: Any) -> Tensor:
    return module.num_kept


@pytest.mark.parametrize(
    ("module", "strategy"),
    [
        (Masking(), None),
        (Foreign(), Weighed(by=count)),
        (ByHand(explicit=False), None),
        (ByHand(explicit=True), None),
    ],
    ids=["said", "by a function", "by hand", "by hand, itself"],
)
def test_what_was_said_is_exact(module: Any, strategy: Any) -> None:
    with quiet_lightning():
        report = trainkit.check(module, token_loader(), strategy=strategy)
    assert report.exact, str(report)
    assert report.deviation < 1e-12
    offs = [cut.deviation for cut in report.cuts if cut.name == "plain accumulation"]
    assert all(off and off > 1e-2 for off in offs)  # the control


@pytest.mark.parametrize(
    ("module", "strategy"), [(Foreign(), PerToken()), (Wrong(), None)]
)
def test_another_count_is_not_and_the_remedy_is_named(
    module: Any, strategy: Any
) -> None:
    with quiet_lightning():
        report = trainkit.check(module, token_loader(), strategy=strategy)
    assert not report.exact
    (cause,) = report.causes
    assert "with weights that nothing in the batch counts" in cause.text
    assert cause.remedy[0].startswith("accumulation = Weighed(), and in training_step")
    assert "Weighed(by=...)" in cause.remedy[1]


def test_a_plain_module_needs_a_function() -> None:
    with quiet_lightning(), pytest.raises(TrainkitError, match="Foreign has no Accum"):
        trainkit.check(Foreign(), token_loader(), strategy=Weighed())
