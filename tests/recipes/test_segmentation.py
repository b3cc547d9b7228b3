"""A U-Net with BatchNorm and Dice: two things that look across a big batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import default_collate

from recipes.apart import off_by, weights_at_end, weights_at_start
from recipes.segmentation import Segmentation, Shapes
from recipes.segmentation.segmentation import CLASSES, areas, dice, draw_shapes
from tests.helpers import NAIVE
from tests.recipes.debugging import metrics_of, small
from tests.recipes.exact import alone, doubled, window_is_off_by
from trainkit import PerSample

DEBUG = [
    *small("segmentation"),
    "trainer.precision=64-true",
    "trainer.max_steps=2",
    "trainer.val_check_interval=2",
]
UNCUT = [
    "accumulation=per_sample",
    "micro_batching=none",
    "~micro_batching.inside",
    "~micro_batching.size",
]
SPLIT = ["micro_batching=size", "~micro_batching.inside", "accumulation=per_sample"]
EXACT = 1e-10
"""Of the distance travelled, in float64."""


def test_chunks_with_exact_batch_norm_are_the_big_batch(
    run_train: Callable[..., Path],
) -> None:
    whole = run_train(*DEBUG, *UNCUT, "batchnorm=ignore", name="whole")
    start, end = weights_at_start(whole), weights_at_end(whole)
    assert not start.equal(end)
    chunks = run_train(*DEBUG, name="chunks")
    assert off_by(weights_at_end(chunks), end, start) < EXACT
    by_size = run_train(*DEBUG, *SPLIT, name="by_size")  # the net runs in chunks too
    assert off_by(weights_at_end(by_size), end, start) < EXACT
    metrics = metrics_of(chunks)
    assert 0 <= metrics["val/dice"] <= 1
    assert 0 < metrics["held_mb"] < 1


def test_accumulation_is_not_the_big_batch() -> None:
    """Negative control, for its BatchNorm and for its Dice alone."""
    data = Shapes(num_train=8, num_val=1, side=16)
    data.setup("fit")
    rows = [doubled(row) for row in data.train_rows]
    module = alone(Segmentation(width=2))
    for with_batch_norm in (True, False):
        module.train(with_batch_norm)
        off = window_is_off_by(
            module, PerSample(), rows, default_collate, cuts=[3, 3, 2]
        )
        assert off > NAIVE


def test_the_dice_of_parts_is_not_that_of_the_whole() -> None:
    torch.manual_seed(0)
    likely = torch.rand(6, len(CLASSES), 8, 8).softmax(1)
    classes = torch.randint(0, len(CLASSES), (6, 8, 8))
    whole = areas(likely, classes)
    parts = [areas(likely[n : n + 2], classes[n : n + 2]) for n in (0, 2, 4)]
    torch.testing.assert_close(torch.stack(parts).sum(0), whole)
    means = torch.stack([dice(each) for each in parts]).mean(0)
    assert float((means - dice(whole)).abs().max()) > 1e-4


def test_a_perfect_prediction_has_a_dice_of_one() -> None:
    classes = torch.tensor([[[0, 1], [2, 3]]])
    likely = torch.eye(4)[classes].movedim(-1, 1)
    assert dice(areas(likely, classes)).tolist() == [1, 1, 1, 1]
    assert dice(areas(1 - likely, classes)).max() < 1


def test_an_image_depends_on_its_seed_and_row_alone() -> None:
    one, other = draw_shapes(3, 5, 16), draw_shapes(3, 5, 16)
    assert all(a.equal(b) for a, b in zip(one, other, strict=True))
    assert not one[0].equal(draw_shapes(3, 6, 16)[0])
    assert not one[0].equal(draw_shapes(4, 5, 16)[0])


def test_all_shapes_occur_and_training_and_validation_share_no_image() -> None:
    data = Shapes(num_train=40, num_val=20, side=32)
    data.setup("fit")
    assert (len(data.train_rows), len(data.val_rows)) == (40, 20)
    images, classes = data.train_rows.tensors
    assert classes.unique().tolist() == [0, 1, 2, 3]
    seen = {tuple(image.flatten().tolist()) for image in images}
    assert not seen & {tuple(x.flatten().tolist()) for x in data.val_rows.tensors[0]}


@pytest.mark.parametrize("side", [16, 32])
def test_the_net_gives_each_pixel_a_class(side: int) -> None:
    found = Segmentation(width=2)(torch.randn(2, 3, side, side))
    assert found.shape == (2, len(CLASSES), side, side)
    torch.testing.assert_close(found.sum(1), torch.ones(2, side, side))
