"""A generative adversarial net: two optimizers, two windows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from recipes.apart import off_by, weights_at_end, weights_at_start
from recipes.gan import Digits, DigitsGAN
from recipes.gan.gan import sliced_wasserstein
from tests.helpers import NAIVE, TOLERANCE
from tests.recipes.debugging import run_debug, small
from tests.recipes.exact import doubled, off, whole_gradient, window_gradient
from trainkit import PerSample, Uniform

LOSSES = {"critic": DigitsGAN.critic_loss, "generator": DigitsGAN.generator_loss}


@pytest.fixture(scope="module")
def window() -> list[Any]:
    """The two micro-batches of an epoch's last window."""
    data = Digits(batch_size=16, num_train=18, latent=4)
    data.setup("fit")
    batches = [
        doubled(data.with_noise(batch, epoch=0)) for batch in data.train_dataloader()
    ]
    assert [len(batch["real"]) for batch in batches] == [16, 2]
    return batches


def both(window: list[Any], net: str, strategy: Any) -> float:
    torch.manual_seed(0)
    module = DigitsGAN(latent=4, width=8).double()
    together = {
        name: torch.cat([batch[name] for batch in window]) for name in window[0]
    }
    whole = whole_gradient(module, LOSSES[net], together)
    return off(window_gradient(module, LOSSES[net], window, strategy), whole)


@pytest.mark.parametrize("net", LOSSES)
def test_window_equals_the_big_batch(window: list[Any], net: str) -> None:
    """The penalty on the critic's slope too, which is differentiated twice."""
    assert both(window, net, PerSample()) <= TOLERANCE[torch.float64]


@pytest.mark.parametrize("net", LOSSES)
def test_a_mean_of_means_differs(window: list[Any], net: str) -> None:
    """Negative control: the 2 images of the last micro-batch are half of the step."""
    assert both(window, net, Uniform()) > NAIVE


def test_noise_is_that_of_the_row_wherever_it_is_read() -> None:
    """With noise of the batch, two ranks would train something else than one."""
    data = Digits(latent=4)
    data.setup("fit")
    rows = data.train_rows
    whole, rest = (default_collate(each) for each in (rows[:6], rows[4:6]))
    drawn = data.with_noise(whole, epoch=1)["noise"]
    assert torch.equal(drawn[4:], data.with_noise(rest, epoch=1)["noise"])
    assert not torch.equal(drawn, data.with_noise(whole, epoch=2)["noise"])
    assert len(drawn.unique()) == drawn.numel()


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
    start, end = weights_at_start(big), weights_at_end(big)
    assert off_by(weights_at_end(cut), end, start) < 1e-3  # Adam
    assert off_by(weights_at_end(uniform), end, start) > NAIVE


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


def test_debug_size_trains_both_nets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    metrics = run_debug("gan", tmp_path)
    assert 0 < metrics["val/distance"] < 1
