"""Recipes on images: NT-Xent, nets with BatchNorm, a GAN, and a U-Net with Dice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import default_collate

from recipes import contrastive, digits_bn, gan
from recipes.contrastive.contrastive import Contrastive, nt_xent
from recipes.gan.gan import DigitsGAN, sliced_wasserstein
from recipes.segmentation.segmentation import (
    CLASSES,
    Segmentation,
    Shapes,
    areas,
    dice,
    draw_shapes,
)
from tests.helpers import NAIVE
from tests.recipes.small import (
    EXACT,
    alone,
    doubled,
    joined,
    metrics_of,
    off,
    off_the_first,
    small,
    whole_gradient,
    window_gradient,
    window_is_off_by,
)
from trainkit import PerSample, Uniform

TWO_STEPS = ["trainer.precision=64-true", "trainer.max_steps=2"]
VALIDATED = "trainer.val_check_interval=2"


def window_of_batches_is_off_by(
    module: Any, loss_of: Any, window: list[Any], strategy: Any
) -> float:
    whole = whole_gradient(module, loss_of, joined(window))
    return off(window_gradient(module, loss_of, window, strategy), whole)


# ---- NT-Xent: the negatives of a big batch -------------------------------------------


def test_the_inner_cut_of_nt_xent_is_the_big_batch(
    run_train: Callable[..., Path],
) -> None:
    words = [*small("contrastive"), *TWO_STEPS]
    whole = run_train(*words, "micro_batching.size=32", name="whole")
    inside = run_train(*words, VALIDATED, name="inside")
    assert off_the_first(whole, inside)[0] < EXACT
    metrics = metrics_of(inside)
    assert 0 <= metrics["val/probe"] <= 1
    assert 0 < metrics["held_mb"] < 1


@pytest.fixture(scope="module")
def digits() -> contrastive.Digits:
    data = contrastive.Digits()
    data.setup("fit")
    return data


def views_of(data: contrastive.Digits, number: int, *, epoch: int) -> Any:
    return data.with_views(default_collate(data.train_rows[:number]), epoch=epoch)


def test_accumulation_of_nt_xent_is_not_the_big_batch(
    digits: contrastive.Digits,
) -> None:
    """Negative control."""
    whole = doubled(views_of(digits, 32, epoch=0))
    parts = zip(*(value.split(8) for value in whole.values()), strict=True)
    window = [dict(zip(whole, part, strict=True)) for part in parts]
    module = alone(Contrastive(width=4))
    naive = window_of_batches_is_off_by(module, Contrastive.loss, window, PerSample())
    assert naive > NAIVE


def test_views_are_those_of_the_row_wherever_it_is_read(
    digits: contrastive.Digits,
) -> None:
    """With views of the batch, the three trainings would see different images."""
    whole, part = views_of(digits, 6, epoch=1), views_of(digits, 3, epoch=1)
    for name in ("one", "other"):
        torch.testing.assert_close(whole[name][:3], part[name])
    assert not torch.equal(part["one"], views_of(digits, 3, epoch=2)["one"])
    assert not torch.equal(part["one"], part["other"])


def test_nt_xent_by_hand() -> None:
    """Of four views, each has one partner and two negatives."""
    one, other = torch.randn(2, 2, 3, dtype=torch.float64)
    views = F.normalize(torch.cat([one, other]), dim=1)
    total = 0.0
    for i in range(4):
        near = [float(views[i] @ views[j]) / 0.5 for j in range(4)]
        partner = (i + 2) % 4
        others = torch.tensor([near[j] for j in range(4) if j != i])
        total += float(torch.logsumexp(others, 0)) - near[partner]
    assert float(nt_xent(one, other, 0.5)) == pytest.approx(total / 4)


def test_the_probe_reads_the_features(digits: contrastive.Digits) -> None:
    """And finds no labels where there are none."""
    torch.manual_seed(0)
    module = Contrastive(width=4)
    known, asked = digits.train_rows, digits.val_rows
    assert module.probe(known, asked) > 0.6  # random features of so easy images
    torch.nn.init.zeros_(next(module.parameters()))
    assert module.probe(known, asked) < 0.2


# ---- a net with BatchNorm ------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "is_training", "is_exact"),
    [(PerSample(), False, True), (PerSample(), True, False), (Uniform(), False, False)],
)
def test_a_window_equals_the_big_batch_but_for_normalisation(
    strategy: Any, is_training: bool, is_exact: bool
) -> None:
    """With fixed statistics it is the big batch; with those of each micro-batch no
    weights make it that. A mean of means differs anyway."""
    data = digits_bn.Digits(num_train=22)
    data.setup("fit")
    window = [doubled(batch) for batch in data.train_dataloader()]
    assert [len(batch[1]) for batch in window] == [4] * 5 + [2]
    module = digits_bn.DigitsNet(width=4).double().train(is_training)

    def loss_of(module: Any, batch: Any) -> torch.Tensor:
        return F.cross_entropy(module(batch[0]), batch[1])

    found = window_of_batches_is_off_by(module, loss_of, window, strategy)
    assert found <= EXACT if is_exact else found > NAIVE


def test_exact_batch_norm_is_the_big_batch(run_train: Callable[..., Path]) -> None:
    """Without it, no weights make it that: see above."""
    few = ["data.num_train=22", "data.batch_size=16", "trainer.log_every_n_steps=1"]
    options = ["experiment=digits_bn_exact", *few, "trainer.precision=64-true"]
    uncut = ["micro_batching.size=16", "batchnorm=ignore"]
    whole = run_train(*options, *uncut, name="whole")
    exact = run_train(*options, name="exact")
    assert off_the_first(whole, exact)[0] < EXACT


# ---- a GAN: two optimizers, two windows ----------------------------------------------


LOSSES = {"critic": DigitsGAN.critic_loss, "generator": DigitsGAN.generator_loss}


@pytest.mark.parametrize("net", LOSSES)
@pytest.mark.parametrize(
    ("strategy", "is_exact"), [(PerSample(), True), (Uniform(), False)]
)
def test_the_window_of_each_net_equals_the_big_batch(
    net: str, strategy: Any, is_exact: bool
) -> None:
    """The penalty on the critic's slope too, which is differentiated twice. To a mean
    of means, the 2 images of the last micro-batch are half of the step."""
    data = gan.Digits(batch_size=16, num_train=18, latent=4)
    data.setup("fit")
    window = [
        doubled(data.with_noise(batch, epoch=0)) for batch in data.train_dataloader()
    ]
    assert [len(batch["real"]) for batch in window] == [16, 2]
    torch.manual_seed(0)
    module = DigitsGAN(latent=4, width=8).double()
    found = window_of_batches_is_off_by(module, LOSSES[net], window, strategy)
    assert found <= EXACT if is_exact else found > NAIVE


@pytest.mark.filterwarnings("ignore:DigitsGAN. its own strategy PerSample")
@pytest.mark.filterwarnings("ignore:proof. a window:UserWarning")  # of the control
def test_training_does_not_depend_on_the_cut(run_train: Callable[..., Path]) -> None:
    """Also not by which net steps when: the two read one another's weights. The
    control is a mean of means: the last window has 8 images and 2."""
    big, cut, uniform = (
        run_train(
            *small("gan", epochs=1),
            f"data.batch_size={size}",
            f"trainer.accumulate_grad_batches={number}",
            "trainer.limit_val_batches=0",
            "metric=null",
            *more,
            name=f"run-{size}-{len(more)}",
        )
        for size, number, *more in ((32, 1), (8, 4), (8, 4, "accumulation=uniform"))
    )
    ours, naive = off_the_first(big, cut, uniform)
    assert ours < 1e-3  # Adam
    assert naive > NAIVE


def test_each_loss_trains_its_own_net() -> None:
    """What `toggle_optimizer` sees to is not needed for the critic's loss."""
    module = DigitsGAN(latent=4, width=8)
    batch = {"real": torch.rand(3, 64), "noise": torch.randn(3, 4)}
    module.critic_loss(batch).backward()
    assert all(p.grad is None for p in module.generator.parameters())
    assert all(p.grad is not None for p in module.critic.parameters())
    assert not batch["real"].requires_grad  # the batch is left as it came


def test_distance_is_that_of_shifted_points() -> None:
    """Along a direction, a shift moves all points by the same: its mean square over
    directions is the shift's square over the dimensions."""
    points = torch.randn(50, 3, dtype=torch.float64)
    shift = torch.tensor([3.0, 0.0, 0.0], dtype=torch.float64)
    distance = sliced_wasserstein(points, points + shift, num_slices=20_000)
    torch.testing.assert_close(distance, shift.norm() / 3**0.5, rtol=0.02, atol=0.0)


# ---- a U-Net with BatchNorm and Dice, which look across a big batch ------------------


SPLIT = ["~micro_batching.inside", "accumulation=per_sample"]
UNCUT = [*SPLIT, "micro_batching=none", "~micro_batching.size", "batchnorm=ignore"]


def test_chunks_with_exact_batch_norm_are_the_big_batch(
    run_train: Callable[..., Path],
) -> None:
    words = [*small("segmentation"), *TWO_STEPS, VALIDATED]
    whole = run_train(*words, *UNCUT, name="whole")
    chunks = run_train(*words, name="chunks")
    # The net runs in chunks, too, where loader batches are cut.
    by_size = run_train(*words, *SPLIT, "micro_batching=size", name="by_size")
    assert max(off_the_first(whole, chunks, by_size)) < EXACT
    metrics = metrics_of(chunks)
    assert 0 <= metrics["val/dice"] <= 1
    assert 0 < metrics["held_mb"] < 1


@pytest.mark.parametrize("with_batch_norm", [True, False])
def test_accumulation_of_dice_is_not_the_big_batch(with_batch_norm: bool) -> None:
    """Negative control, for its BatchNorm and for its Dice alone."""
    data = Shapes(num_train=8, num_val=1, side=16)
    data.setup("fit")
    rows = [doubled(row) for row in data.train_rows]
    torch.manual_seed(2)
    module = alone(Segmentation(width=2)).train(with_batch_norm)
    naive = window_is_off_by(module, PerSample(), rows, default_collate, cuts=[3, 3, 2])
    assert naive > NAIVE


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


def test_all_shapes_occur() -> None:
    data = Shapes(num_train=40, num_val=20, side=32)
    data.setup("fit")
    assert data.train_rows.tensors[1].unique().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("side", [16, 32])
def test_the_net_gives_each_pixel_a_class(side: int) -> None:
    found = Segmentation(width=2)(torch.randn(2, 3, side, side))
    assert found.shape == (2, len(CLASSES), side, side)
    torch.testing.assert_close(found.sum(1), torch.ones(2, side, side))
