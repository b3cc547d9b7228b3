"""Digits, and the windows of a net with BatchNorm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from recipes.apart import off_by, weights_at_end, weights_at_start
from recipes.digits_bn import Digits, DigitsNet
from tests.helpers import NAIVE, TOLERANCE
from tests.recipes.debugging import run_debug
from tests.recipes.exact import doubled, off, whole_gradient, window_gradient
from trainkit import PerSample, Uniform


def loss_of(module: Any, batch: Any) -> torch.Tensor:
    images, labels = batch
    return F.cross_entropy(module(images), labels)


@pytest.fixture(scope="module")
def window() -> list[Any]:
    """An epoch's last six micro-batches, of which the last has 2 images."""
    data = Digits(num_train=22)
    data.setup("fit")
    batches = [doubled(batch) for batch in data.train_dataloader()]
    assert [len(batch[1]) for batch in batches] == [4] * 5 + [2]
    return batches


def both(module: DigitsNet, window: list[Any], strategy: Any) -> float:
    together = [torch.cat(parts) for parts in zip(*window, strict=True)]
    whole = whole_gradient(module, loss_of, together)
    return off(window_gradient(module, loss_of, window, strategy), whole)


def test_window_equals_the_big_batch_but_for_normalisation(window: list[Any]) -> None:
    """With fixed statistics it is the big batch; with those of each micro-batch no
    weights make it that."""
    module = DigitsNet(width=4).double()
    assert both(module, window, PerSample()) > NAIVE
    module.eval()
    assert both(module, window, PerSample()) <= TOLERANCE[torch.float64]


def test_a_mean_of_means_differs(window: list[Any]) -> None:
    """Negative control."""
    assert both(DigitsNet(width=4).double().eval(), window, Uniform()) > NAIVE


def test_exact_batch_norm_is_the_big_batch(run_train: Callable[..., Path]) -> None:
    """Without it, no weights make it that: see above."""
    small = ["data.num_train=22", "data.batch_size=16", "trainer.log_every_n_steps=1"]
    options = ["experiment=digits_bn_exact", *small, "trainer.precision=64-true"]
    size = "micro_batching.size=16"
    whole = run_train(*options, size, "batchnorm=ignore", name="whole")
    exact = run_train(*options, name="exact")
    start, end = weights_at_start(whole), weights_at_end(whole)
    assert off_by(weights_at_end(exact), end, start) < 1e-10


def test_training_and_validation_share_no_image() -> None:
    data = Digits()
    data.setup("fit")
    assert (len(data.train_rows), len(data.val_rows)) == (1206, 591)
    train, val = (
        {tuple(image.flatten().tolist()) for image, _ in rows}
        for rows in (data.train_rows, data.val_rows)
    )
    assert not train & val


@pytest.mark.filterwarnings("ignore:proof. a window:UserWarning")  # of the control
def test_debug_size_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    metrics = run_debug("digits_bn", tmp_path, "batchnorm=momentum")
    assert 0 <= metrics["val/accuracy"] <= 1
