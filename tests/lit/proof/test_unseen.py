"""What the few rows of a proof would not show by themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from tests.lit.proof.starting import fit, images
from tests.zoo.causes import Images
from trainkit import MicroBatching, PerToken, TrainkitError


def unlabelled(size: int = 4) -> Any:
    """A third of the images have no label."""
    loader = images(size)
    for row in range(0, len(loader.dataset), 3):
        loader.dataset[row][1].fill_(-100)
    return loader


def losses(module: Any, maps: Tensor, batch: Any) -> Tensor:
    logits = module.head(maps.mean((2, 3)))
    return F.cross_entropy(logits, batch[1], reduction="none")


def over_labels(module: Any, maps: Tensor, batch: Any) -> Tensor:
    return losses(module, maps, batch).sum() / (batch[1] != -100).sum().clamp(min=1)


def over_rows(module: Any, maps: Tensor, batch: Any) -> Tensor:
    return losses(module, maps, batch).mean()


@pytest.mark.parametrize("cut", [None, MicroBatching(size=2)])
def test_a_loss_may_count_rows_that_weigh_nothing(cut: MicroBatching | None) -> None:
    """Of rows that all weigh something, both losses divide by the same number."""
    fit(Images(over_labels), unlabelled(), PerToken(1), cut, proof="require")
    with pytest.raises(TrainkitError, match=r"by what PerSample\(\) counts"):
        fit(Images(over_rows), unlabelled(), PerToken(1), cut, proof="require")
