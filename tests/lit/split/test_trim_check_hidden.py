"""A model that sees its padding where the first loss does not show it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.lit.split.test_trim_check import BATCHES, CUTS, SEES, Pooled, fit, off
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.lit.split.trim_check import TrimCheck

MANY = [*BATCHES, *BATCHES]


class ZeroHead(Pooled):
    """Its first loss is the same whatever is pooled."""

    def __init__(self, cut: MicroBatching | None = None) -> None:
        super().__init__(cut)
        nn.init.zeros_(self.head.weight)

    def pooled(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return hidden.mean(1)


class ZeroBranch(Pooled):
    """A convolution that begins at 0."""

    def __init__(self, cut: MicroBatching | None = None) -> None:
        super().__init__(cut)
        self.scale = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def hidden(self, batch: Any) -> Tensor:
        hidden = super().hidden(batch)
        return hidden + self.scale * self.conv(hidden.transpose(1, 2)).transpose(1, 2)


class InTraining(Pooled):
    """Takes all columns in training mode alone."""

    def pooled(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return hidden.mean(1) if self.training else super().pooled(hidden, mask)


class FromSomeStepOn(Pooled):
    def pooled(self, hidden: Tensor, mask: Tensor) -> Tensor:
        begins = self.global_step >= 2
        return hidden.mean(1) if begins else super().pooled(hidden, mask)


HIDDEN = [ZeroHead, ZeroBranch, InTraining, FromSomeStepOn]


@pytest.mark.parametrize("kind", HIDDEN)
def test_what_the_first_loss_hides_is_seen(kind: type[Pooled]) -> None:
    with pytest.warns(UserWarning, match=SEES):
        assert off(kind, CUTS[0], MANY) < 1e-12


@pytest.mark.parametrize("kind", HIDDEN)
def test_trimmed_it_gives_other_weights(
    kind: type[Pooled], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""
    monkeypatch.setattr(TrimCheck, "refuses", lambda *args: False)
    assert off(kind, CUTS[0], MANY) > 1e-3


def test_the_gradient_is_named_where_the_loss_is_the_same() -> None:
    with pytest.warns(UserWarning, match=r"its gradient is off by 0\.\d+ of its size"):
        fit(ZeroHead(CUTS[0]), BATCHES[:1])


def test_what_began_later_is_said_to_have_begun() -> None:
    with pytest.warns(UserWarning, match=r"batches before there was no difference yet"):
        fit(FromSomeStepOn(CUTS[0]), MANY)


class Advantages(Pooled):
    """Policy gradients: nearly nothing is left of the loss, at a ratio of 1."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        mask = batch["attention_mask"].unsqueeze(2)
        scores = self.head(self.pooled(self.hidden(batch), mask)).squeeze(1)
        ratio = (scores - scores.detach()).exp()
        gains = batch["y"].float() - batch["y"].float().mean()
        return -(ratio * gains).mean() * (1 + scores.detach().mean())


def test_rounding_of_a_loss_that_cancels_is_no_difference() -> None:
    fit(Advantages(MicroBatching(size=4)).float(), MANY)  # any warning is an error


class TakingNone(Pooled):
    """Its backward pass wants what only Lightning's has."""

    def hidden(self, batch: Any) -> Tensor:
        return checkpoint(super().hidden, batch, use_reentrant=True)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_without_gradients_the_loss_alone_is_compared() -> None:
    class Seeing(TakingNone):
        def pooled(self, hidden: Tensor, mask: Tensor) -> Tensor:
            return hidden.mean(1)

    fit(TakingNone(CUTS[0]), BATCHES)
    with pytest.warns(UserWarning, match=SEES):
        fit(Seeing(CUTS[0]), BATCHES)


class WithFeatures(Pooled):
    """It has as many features as there are columns, and most of them are 0."""

    def __init__(self, cut: MicroBatching | None = None) -> None:
        super().__init__(cut)
        self.of_features = nn.Linear(14, 6, dtype=torch.float64)

    def pooled(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return super().pooled(hidden, mask) + self.features

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.features = self.of_features(batch["features"])
        return super().training_step(batch, batch_idx)


def test_features_that_look_like_padding_are_kept() -> None:
    features = torch.zeros(8, 14, dtype=torch.float64)
    features[:, 0] = 1
    batches = [{**batch, "features": features} for batch in MANY]
    with pytest.warns(UserWarning, match=rf"{SEES}.*training_step raises RuntimeError"):
        assert off(WithFeatures, CUTS[0], batches) < 1e-12
