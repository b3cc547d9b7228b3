"""What the few rows of a proof would not show by themselves."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.lit.proof.starting import fit, images, said
from tests.zoo import causes
from tests.zoo.causes import Images
from tests.zoo.modules import Stream
from trainkit import MicroBatching, PerSample, PerToken, TrainkitError
from trainkit.lit.proof.parts import chosen_parts
from trainkit.lit.proof.rows import FewRows


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


def over_groups(module: Any, maps: Tensor, batch: Any) -> Tensor:
    return losses(module, maps, batch).sum() / len(batch[2].unique())


@pytest.mark.parametrize("size", [1, 3])
def test_rows_beside_each_other_may_belong_together(size: int) -> None:
    """The control: groups of one row."""
    rows: Any = [
        (image, label, torch.tensor(row // size))
        for row, (image, label, *_) in enumerate(images().dataset)
    ]
    refused = pytest.raises(TrainkitError, match="not the big batch")
    with refused if size > 1 else contextlib.nullcontext():
        loader = DataLoader(rows, batch_size=5)
        fit(Images(over_groups), loader, PerSample(), proof="require")


def test_only_what_is_collated_makes_a_row_wide() -> None:
    """A text beside the tokens has a length of its own."""
    lengths = [3] * 10 + [5, 7]
    ids = [torch.arange(1, 1 + length) for length in lengths]
    samples = [
        {"ids": each, "labels": each, "text": " " * (50 + 7 * row % 12)}
        for row, each in enumerate(ids)
    ]
    rows = FewRows(
        causes.padded(samples), None, PerSample(), samples=samples,
        collate=causes.padded, pads=True,
    )  # fmt: skip
    parts = chosen_parts(rows, (1, 2, 3), PerSample())
    assert {max(lengths[row] for row in part) for part in parts} == {3, 5, 7}


class Probed(Images):
    """A probe with BatchNorm, whose gradient is a millionth of all."""

    def __init__(self, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__(causes.classified)
        self.probe = nn.Sequential(norm(8), nn.Linear(8, 5))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        pooled = self.net(batch[0]).detach().mean((2, 3))
        probe = F.cross_entropy(self.probe(pooled), batch[1])
        return 1e6 * super().training_step(batch, batch_idx) + probe


def test_a_small_share_of_the_gradient_may_be_wrong() -> None:
    """Adam moves it as far as any other."""
    fit(Probed(nn.LayerNorm), images(4), PerSample(), proof="require")
    with pytest.raises(TrainkitError, match="BatchNorm"):
        fit(Probed(), images(4), PerSample(), proof="require")


def test_functions_of_a_lambda_callback_are_rehearsed() -> None:
    def clip(trainer: Any, module: Any) -> None:
        nn.utils.clip_grad_norm_(module.parameters(), 1e-3)

    clips = LambdaCallback(on_after_backward=clip)
    with pytest.raises(TrainkitError, match="on_after_backward of LambdaCallback"):
        fit(
            Images(causes.classified),
            images(4),
            PerSample(),
            callbacks=(clips,),
            proof="require",
        )


@pytest.mark.parametrize(
    "draw", [random.random, np.random.rand, lambda: float(torch.rand(()))]
)
def test_draws_that_make_no_difference_here_are_named(
    draw: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    class Seldom(Images):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if draw() < 1e-6:
                batch = [batch[0].roll(1, 0), *batch[1:]]
            return super().training_step(batch, batch_idx)

    fit(Seldom(causes.classified), images(4), PerSample())
    assert said(capsys).endswith("in float32; left out: random draws")


class Clipping(Precision):
    """A plugin of the user's, which a copy runs without."""


def test_later_batches_and_plugins_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows: Any = DataLoader(Stream(list(images().dataset)), 4)
    fit(Images(causes.classified), rows, PerSample(), plugins=[Clipping()])
    assert said(capsys).endswith("left out: later batches, Clipping")
