"""Divisors whose parts do not add up to the whole, so that no weights are exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from tests.lit.proof.test_check import check
from tests.lit.proof.zoo import Images, Tokens, image_loader, token_loader
from trainkit import PerSample, PerToken


def errors(module: Any, maps: Tensor, batch: Any) -> Tensor:
    return (module.head(maps.mean((2, 3))).sum(1) - batch[2]).square()


def explained_share(module: Any, maps: Tensor, batch: Any) -> Tensor:
    """1 - R2: the parts' spreads around their own means are less than the whole's."""
    return (
        errors(module, maps, batch).sum() / (batch[2] - batch[2].mean()).square().sum()
    )


def by_spread(module: Any, maps: Tensor, batch: Any) -> Tensor:
    return errors(module, maps, batch).mean() / batch[2].std(unbiased=False).clamp(
        min=1e-3
    )


def by_root_of_rows(module: Any, maps: Tensor, batch: Any) -> Tensor:
    return errors(module, maps, batch).sum() / len(batch[2]) ** 0.5


@pytest.mark.parametrize("loss", [explained_share, by_spread, by_root_of_rows])
def test_a_divisor_that_does_not_add_up_has_no_weight(
    loss: Callable[..., Tensor],
) -> None:
    report = check(Images(loss), image_loader(), strategy=PerSample())
    (cause,) = report.causes
    assert cause.kind == "loss"
    assert not any("weigh" in line.lower() for line in cause.remedy)


def mean_of_all(module: Any, logits: Tensor, batch: dict[str, Any]) -> Tensor:
    losses = F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
    return losses.mean()  # also over padding, whose losses are zero


def test_a_mean_over_padding_too_has_no_weight() -> None:
    report = check(Tokens(mean_of_all), token_loader(), strategy=PerToken())
    (cause,) = report.causes
    assert (cause.kind, cause.place) == ("padding", "training_step")


def mean_by_features(module: Any, maps: Tensor, batch: Any) -> Tensor:
    """The control: weights that nothing in the batch counts, and that add up."""
    weights = 1 + maps.detach().sum((1, 2, 3)).square()
    return (errors(module, maps, batch) * weights).sum() / weights.sum()


def test_weights_that_add_up_can_still_be_said() -> None:
    report = check(Images(mean_by_features), image_loader(), strategy=PerSample())
    (cause,) = report.causes
    assert cause.kind == "denominator"
    assert "Weighed()" in cause.remedy[0]
